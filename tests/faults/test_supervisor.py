"""The supervisor: real processes that stand in for ranks, ended in every way that a rank can end."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

import runs
from outlast import journal
from outlast.errors import OutlastError, ResumeError
from outlast.faults import supervisor
from outlast.faults.supervisor import supervise
from outlast.journal import Journal

RANK = """
import os, signal, sys, threading, time
from pathlib import Path
from outlast import environment, errors, journal

launched, here = environment.launched(), Path(sys.argv[1])
me = launched.rank
(here / f"{me}.new").write_text(str(os.getpid()))
(here / f"{me}.new").rename(here / f"{me}.pid")
journal.leave_with_supervisor(launched)

def wait_for(*names):
    while not all((here / name).exists() for name in names):
        time.sleep(0.005)

def fail(error):
    journal.report(launched, error)
    sys.exit(getattr(error, "exit_code", 1))

def begin():
    if me == 0:
        sender = journal.Sender(launched)
        sender.write("start", 0)
        sender.write("step", 1, durable=False)
        (here / "begun").touch()
        return sender
    wait_for("begun")

"""


def alive(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def wait_until(true, seconds):
    stop = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < stop
        time.sleep(0.005)


@pytest.fixture
def here(tmp_path):
    """A folder where ranks leave their process numbers; none of them may be there at the end, and no thread."""
    threads = threading.active_count()
    yield tmp_path
    pids = [int(path.read_text()) for path in tmp_path.glob("*.pid")]
    try:
        wait_until(lambda: not any(map(alive, pids)) and threading.active_count() <= threads, 2)
    finally:
        for pid in filter(alive, pids):
            os.kill(pid, signal.SIGKILL)


def command(here, body):
    (here / "rank.py").write_text(RANK + body)
    return [sys.executable, "-u", str(here / "rank.py"), str(here)]


def failure(here, body, ranks=2):
    with pytest.raises(OutlastError) as caught:
        supervise(command(here, body), ranks, here / "run")
    return caught.value


def lines(here):
    return [(line["event"], line["attempt"], line["step"]) for line in runs.journal(here / "run")]


def outcome(here):
    told = json.loads((here / "run" / "outcome.json").read_text())
    return told["outcome"], told["exit_code"]


def test_a_clean_end_and_a_second_attempt(here, capfd):
    body = """
journal_ = begin()
print("said by", me, "of", launched.ranks)
print("complained by", me, file=sys.stderr)
if me == 0:
    journal_.write("step", 2, why=f"attempt {journal_.attempt} in {journal_.path}", number=float("inf"))
    journal_.close()
"""
    handlers = [signal.getsignal(one) for one in supervisor.PASSED_ON]
    assert supervise(command(here, body), 3, here / "run") == 0
    assert [signal.getsignal(one) for one in supervisor.PASSED_ON] == handlers
    said = capfd.readouterr()
    assert said.out == "said by 0 of 3\n"
    assert said.err == "complained by 0\n"
    assert lines(here) == [("start", 1, 0), ("step", 1, 1), ("step", 1, 2), ("end", 1, 2)]
    assert runs.journal(here / "run")[2]["why"] == f"attempt 1 in {here / 'run' / 'journal.jsonl'}"
    assert outcome(here) == ("done", 0)
    (here / "begun").unlink()
    assert supervise(command(here, body), 3, here / "run") == 0
    assert lines(here)[4:] == [("start", 2, 0), ("step", 2, 1), ("step", 2, 2), ("end", 2, 2)]
    log = (here / "run" / "logs" / "rank-2.log").read_text().splitlines()
    assert log[0].startswith("--- attempt 1, ")
    assert log[3].startswith("--- attempt 2, ")
    assert log[1:3] == log[4:] == ["said by 2 of 3", "complained by 2"]


def test_the_houses_own_error_is_told_as_in_one_process(here):
    error = failure(
        here,
        """
begin()
if me == 1:
    fail(errors.DataError("a sample is damaged", fix="mend it", where="corpus/a.txt"))
threading.Event().wait()
""",
    )
    assert str(error) == "a sample is damaged\n  mend it\n  rank 1, corpus/a.txt"
    assert error.exit_code == 2
    assert lines(here)[2:] == [("fault", 1, 1), ("end", 1, 1)]
    fault = runs.journal(here / "run")[2]
    assert (fault["rank"], fault["what"], fault["exit_code"]) == (1, "DataError: a sample is damaged", 2)
    assert outcome(here) == ("rank 1: DataError: a sample is damaged", 2)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_unexpected_error_is_one_line_and_its_traceback_is_in_the_log(here, rank):
    error = failure(
        here,
        f"""
begin()
try:
    if me == {rank}:
        raise ValueError("no such thing\\nand more")
    raise errors.PeerError("another rank is gone")
except Exception as error:
    fail(error)
""",
    )
    log = here / "run" / "logs" / f"rank-{rank}.log"
    assert str(error) == f"rank {rank}: ValueError: no such thing\n  the traceback is in {log}"
    assert error.exit_code == 1
    assert log.read_text().splitlines()[1] == "Traceback (most recent call last):"
    assert outcome(here) == (f"rank {rank}: ValueError: no such thing\nand more", 1)


def test_a_killed_rank_is_named_and_the_others_end_within_seconds(here):
    assert supervisor.AFTER_A_FAULT[-1][0] <= 5.5
    error = failure(
        here,
        """
begin()
if me == 1:
    os.kill(os.getpid(), signal.SIGKILL)
(here / "killed").write_text(str(time.time()))
threading.Event().wait()
""",
    )
    assert time.time() - float((here / "killed").read_text()) < 4
    log = here / "run" / "logs" / "rank-1.log"
    assert str(error) == (
        "rank 1 was ended by SIGKILL\n"
        "  the other ranks were stopped; the same command goes on from the newest checkpoint\n"
        f"  its last words are in {log}"
    )
    assert error.exit_code == 75
    assert lines(here) == [("start", 1, 0), ("step", 1, 1), ("fault", 1, 1), ("end", 1, 1)]
    assert outcome(here) == ("rank 1: was ended by SIGKILL", 75)


def test_a_rank_that_heeds_no_sigterm_is_killed_with_all_it_started(here, monkeypatch):
    monkeypatch.setattr(supervisor, "AFTER_A_FAULT", ((0.1, signal.SIGTERM), (0.3, signal.SIGKILL)))
    error = failure(
        here,
        """
import subprocess
if me == 1:
    wait_for("ready")
    os._exit(3)
signal.signal(signal.SIGTERM, lambda *_: (here / "asked").touch())
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
(here / "child.pid").write_text(str(child.pid))
(here / "ready").touch()
while True:
    signal.pause()
""",
    )
    assert (here / "asked").exists()
    assert str(error) == f"rank 1 ended with exit code 3\n  its last words are in {here}/run/logs/rank-1.log"
    assert error.exit_code == 3


def test_what_a_rank_says_of_its_peers_is_never_the_cause(here):
    error = failure(
        here,
        """
begin()
if me < 2:
    journal.report(launched, errors.PeerError(f"rank {me} lost a peer"))
    (here / f"told{me}").touch()
    sys.exit(75)
wait_for("told0", "told1")
fail(errors.DivergedError("the loss is nan"))
""",
        ranks=3,
    )
    assert str(error) == "the loss is nan\n  rank 2"
    assert error.exit_code == 70
    assert [line["rank"] for line in runs.journal(here / "run") if line["event"] == "fault"] == [2]


def test_where_ranks_only_miss_each_other_the_first_to_say_so_is_told(here):
    error = failure(
        here,
        """
if me == 0:
    wait_for("told")
journal.report(launched, errors.PeerError(f"rank {me} lost a peer"))
(here / "told").touch()
sys.exit(75)
""",
    )
    assert str(error) == "rank 1 lost a peer\n  rank 1"
    assert error.exit_code == 75


LEAVES = """
asked = []
for one in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT):
    signal.signal(one, lambda number, _: asked.append(signal.Signals(number).name))
begin()
(here / f"ready{me}").touch()
if me == 0:
    wait_for("ready0", "ready1")
    os.kill(os.getppid(), signal.Signals[sys.argv[2]])
while not asked:
    time.sleep(0.005)
print("asked by", *asked)
sys.exit(130 if "SIGINT" in asked else 75)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT"])
def test_a_signal_is_passed_on_and_the_run_is_left(here, name):
    code = supervise([*command(here, LEAVES), name], 2, here / "run")
    assert code == (130 if name == "SIGINT" else 75)
    assert lines(here)[2:] == [("end", 1, 1)]
    assert outcome(here) == (f"left at {name}", code)
    assert f"asked by {name}\n" in (here / "run" / "logs" / "rank-1.log").read_text()


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_second_signal_waits_for_nobody(here, name):
    body = """
count, one = [], signal.Signals[sys.argv[-1]]
signal.signal(one, lambda *_: (count.append(1), (here / f"told{me}.{len(count)}").touch()))
(here / f"ready{me}").touch()
if me == 0:
    wait_for("ready0", "ready1")
    os.kill(os.getppid(), one)
    wait_for("told0.1", "told1.1")
    os.kill(os.getppid(), one)
while True:
    signal.pause()
"""
    assert supervise([*command(here, body), name], 2, here / "run") == (130 if name == "SIGINT" else 75)


def test_ranks_that_left_when_asked_do_not_wait_for_one_that_hangs(here, monkeypatch):
    monkeypatch.setattr(supervisor, "AFTER_A_RANK_LEFT", ((0.1, signal.SIGTERM), (0.3, signal.SIGKILL)))
    body = """
begin()
(here / f"ready{me}").touch()
if me == 0:
    signal.signal(signal.SIGTERM, lambda *_: (here / "deaf").touch())
    wait_for("ready1")
    os.kill(os.getppid(), signal.SIGTERM)
while True:
    signal.pause()
"""
    # Rank 1 has no handler yet: the signal ends it. It was asked to leave, and that it did.
    assert supervise(command(here, body), 2, here / "run") == 75
    assert outcome(here) == ("left at SIGTERM", 75)


def test_peers_missed_on_the_way_out_are_no_failure(here):
    body = """
signal.signal(signal.SIGTERM, lambda *_: (here / f"asked{me}").touch())
begin()
(here / f"ready{me}").touch()
if me == 0:
    wait_for("ready1")
    os.kill(os.getppid(), signal.SIGTERM)
wait_for(f"asked{me}")
if me == 0:
    fail(errors.PeerError("another rank is gone"))
sys.exit(75)
"""
    assert supervise(command(here, body), 2, here / "run") == 75
    assert outcome(here) == ("left at SIGTERM", 75)


def test_an_ignored_signal_stays_ignored(here):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        body = "os.kill(os.getppid(), signal.SIGHUP) if me == 0 else None\n"
        assert supervise(command(here, body), 2, here / "run") == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_full_disk_under_the_journal_is_rank_0s_error(here, small_disk):
    folder = small_disk / "run"
    body = """
sender = begin()
if me == 0:
    try:
        while True:
            sender.write("note", 1, durable=False, text="x" * 100_000)
    except errors.StorageError as error:
        (here / "caught").write_text(str(error))
        fail(error)
threading.Event().wait()
"""
    with pytest.raises(OutlastError, match="cannot write the journal: No space left on device") as caught:
        supervise(command(here, body), 2, folder)
    assert caught.value.exit_code == 70
    assert caught.value.where == f"rank 0, {folder}/journal.jsonl"
    assert "free some space" in (here / "caught").read_text()
    assert journal.read(folder / "journal.jsonl")[0]["event"] == "start"


def test_a_folder_that_is_in_use_starts_nobody(here):
    held = contextlib.closing(Journal(here / "run" / "journal.jsonl"))
    with held, pytest.raises(ResumeError, match="another process is training"):
        supervise(command(here, ""), 2, here / "run")
    assert not list(here.glob("*.pid"))


def test_a_start_that_was_refused_leaves_the_runs_records_alone(here):
    (here / "run").mkdir()
    (here / "run" / "outcome.json").write_text("of another start")
    error = failure(here, 'fail(errors.ResumeError("the folder holds another run"))')
    assert error.exit_code == 2
    assert lines(here) == []
    assert (here / "run" / "outcome.json").read_text() == "of another start"


@pytest.mark.parametrize("where", ["at once", "in a wait without end"])
def test_ranks_leave_with_a_supervisor_that_is_killed(here, where):
    body = "begin()\n(here / f'ready{me}').touch()\nthreading.Event().wait()\n"
    if where == "at once":
        body = body.replace("threading.Event().wait()", "while True: pass")
    driver = f"""
from pathlib import Path
from outlast.faults.supervisor import supervise
supervise({command(here, body)!r}, 2, Path({str(here / "run")!r}))
"""
    with subprocess.Popen([sys.executable, "-c", driver]) as process:
        try:
            wait_until(lambda: (here / "ready0").exists() and (here / "ready1").exists(), 60)
        finally:
            process.kill()
    pids = [int(path.read_text()) for path in here.glob("*.pid")]
    assert len(pids) == 2
    wait_until(lambda: not any(map(alive, pids)), 5)
    Journal(here / "run" / "journal.jsonl").close()


def test_the_ranks_form_a_process_group(here):
    body = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([launched.rank + 1.0])
dist.all_reduce(total)
dist.destroy_process_group()
sys.exit(0 if total.item() == 3 else 4)
"""
    assert supervise(command(here, body), 2, here / "run") == 0


def test_lines_of_a_rank_that_is_killed_are_all_there(here):
    body = """
sender = begin()
if me == 0:
    for step in range(2, 200):
        sender.write("step", step, durable=False)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert failure(here, body).exit_code == 75
    assert [step for event, _, step in lines(here) if event == "step"] == list(range(1, 200))
