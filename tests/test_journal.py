"""The journal: whole lines, one writer, the history that survives, and how a rank reaches the one writer."""

import contextlib
import json
import queue
import socket
import subprocess
import sys
import threading

import pytest

from outlast import environment, journal
from outlast.environment import Launched
from outlast.errors import PeerError, ResumeError, StorageError, UsageError
from outlast.faults import supervisor
from outlast.journal import Journal, Sender


def test_a_torn_line_is_dropped_and_does_not_spoil_the_next(tmp_path):
    path = tmp_path / "run" / "journal.jsonl"
    first = Journal(path)
    first.write("start", 0)
    first.write("step", 1, samples=[0, 8])
    first.close()
    path.write_bytes(path.read_bytes() + b'{"event": "step", "st')
    assert [line["event"] for line in journal.read(path)] == ["start", "step"]
    second = Journal(path)
    second.write("start", 1)
    second.close()
    lines = journal.read(path)
    assert [(line["event"], line["attempt"], line["step"]) for line in lines] == [
        ("start", 1, 0),
        ("step", 1, 1),
        ("start", 2, 1),
    ]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_two_writers_are_refused(tmp_path):
    held = Journal(tmp_path / "journal.jsonl")
    with pytest.raises(ResumeError, match="another process"):
        Journal(tmp_path / "journal.jsonl")
    held.close()
    Journal(tmp_path / "journal.jsonl").close()


def test_a_killed_writer_lets_go(tmp_path):
    code = f"""
import os, signal
from pathlib import Path
from outlast.journal import Journal
Journal(Path({str(tmp_path / "journal.jsonl")!r})).write("start", 0)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    again = Journal(tmp_path / "journal.jsonl")
    assert again.attempt == 2
    again.close()


def line(event, attempt, step):
    return {"event": event, "attempt": attempt, "step": step}


def test_every_start_takes_back_what_came_after_it():
    lines = [line("start", 1, 0), *(line("step", 1, s) for s in range(1, 8))]
    lines += [line("start", 2, 4), line("step", 2, 5)]
    lines += [line("start", 3, 4), *(line("step", 3, s) for s in (5, 6))]
    assert [(kept["attempt"], kept["step"]) for kept in journal.surviving(lines)] == [
        (1, 1),
        (1, 2),
        (1, 3),
        (1, 4),
        (3, 5),
        (3, 6),
    ]
    assert journal.surviving([]) == []


@pytest.mark.parametrize("bad", [b"\0\0\0", b"{}", b"[1]", b"not json"])
def test_a_damaged_line_is_named(tmp_path, bad):
    path = tmp_path / "journal.jsonl"
    first = Journal(path)
    first.write("start", 0)
    first.close()
    path.write_bytes(path.read_bytes() + bad + b"\n" + path.read_bytes())
    with pytest.raises(StorageError, match="line 2 of the journal is damaged"):
        Journal(path)
    path.write_bytes(path.read_bytes().replace(bad + b"\n", b""))
    Journal(path).close()


def test_no_file_is_no_lines(tmp_path):
    assert journal.read(tmp_path / "none.jsonl") == []


def test_a_full_disk_leaves_whole_lines_and_nothing_behind(small_disk):
    path = small_disk / "journal.jsonl"
    held = Journal(path)
    held.write("start", 0)
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    with pytest.raises(StorageError, match="cannot write the journal: No space left on device"):
        held.write("step", 1, text="x" * 10_000)
    assert [line["event"] for line in journal.read(path)] == ["start"]
    filler.unlink()
    held.write("step", 2)
    held.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 2]


def test_how_a_run_was_left_is_its_last_line_and_a_record_beside_it(tmp_path):
    held = Journal(tmp_path / "journal.jsonl")
    assert held.step is None
    held.write("start", 3)
    assert held.step == 3
    journal.end(held, 4, "left at SIGTERM", 75)
    held.close()
    told = {"outcome": "left at SIGTERM", "exit_code": 75}
    assert journal.read(held.path)[-1].items() >= (told | {"event": "end", "attempt": 1, "step": 4}).items()
    assert json.loads((tmp_path / "outcome.json").read_text()).items() >= (told | {"step": 4}).items()


@pytest.fixture
def port(tmp_path):
    """A journal that can be reached, and a rank's way to it."""
    written = Journal(tmp_path / "journal.jsonl")
    opened = supervisor.JournalPort(written, queue.SimpleQueue())
    with contextlib.closing(written), contextlib.closing(opened):
        yield opened
    assert not any(thread.is_alive() for thread in opened._threads)


def launched_at(port, key=None):
    return Launched(0, 2, 0, 2, port.address, port.key if key is None else key)


def test_whoever_knows_no_key_is_not_heard_and_holds_up_nobody(port):
    with socket.create_connection(port.address), socket.create_connection(port.address) as talker:
        talker.sendall(b"\0\0\0\5GET /")
        with pytest.raises(PeerError):
            Sender(launched_at(port, b"another"))
        with contextlib.closing(Sender(launched_at(port))) as sender:
            sender.write("start", 0)
            assert (sender.attempt, sender.path.name) == (1, "journal.jsonl")
    assert [line["event"] for line in journal.read(sender.path)] == ["start"]


def test_lines_from_several_threads_are_whole_and_each_is_answered(port):
    with contextlib.closing(Sender(launched_at(port))) as sender:

        def write(thread):
            for step in range(50):
                sender.write("step", step, durable=False, thread=thread, text="x" * 5000)

        threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    written = journal.read(sender.path)
    for number in range(4):
        assert [line["step"] for line in written if line["thread"] == number] == list(range(50))


def test_a_supervisor_that_is_gone(port, monkeypatch):
    with contextlib.closing(Sender(launched_at(port))) as sender:

        def fail(said):
            raise OSError  # closes the connection, as the process's end would

        monkeypatch.setattr(port, "_answer", fail)
        with pytest.raises(PeerError, match="the supervisor is gone") as caught:
            sender.write("start", 0)
    assert caught.value.exit_code == 75
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = Launched(0, 2, 0, 2, closed.getsockname(), b"key")
    for call in (Sender, journal.leave_with_supervisor):
        with pytest.raises(PeerError):
            call(nobody)
    assert not journal.report(nobody, ValueError("unheard"))
    assert not journal.report(Launched(0, 2, 0, 2), ValueError("under torchrun"))


def test_a_line_that_cannot_be_written_is_told_and_the_next_is_tried(port, monkeypatch):
    def full(*args, **fields):
        raise StorageError("cannot write the journal: full", fix="free some space", where="there")

    with contextlib.closing(Sender(launched_at(port))) as sender:
        with monkeypatch.context() as patched:
            patched.setattr(Journal, "write", full)
            with pytest.raises(StorageError) as caught:
                sender.write("start", 0)
        assert str(caught.value) == "cannot write the journal: full\n  free some space\n  there"
        sender.write("start", 0)


def test_what_a_launcher_tells(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OUTLAST_JOURNAL", "OUTLAST_JOURNAL_KEY"):
        monkeypatch.delenv(name, raising=False)
    assert environment.launched() is None
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    for told in (Launched(1, 4, 0, 2), Launched(3, 4, 1, 2, ("127.0.0.1", 5000), b"\0key")):
        for name, text in told.environment().items():
            monkeypatch.setenv(name, text)
        assert environment.launched() == told
        assert "key" not in repr(told)


MET = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"WORLD_SIZE": None}, "RANK is set in the environment, and WORLD_SIZE is not"),
        ({"LOCAL_RANK": "one"}, "RANK is set in the environment, and LOCAL_RANK is 'one', which is no number"),
        ({"RANK": "-1"}, "RANK is set in the environment, and RANK is '-1', which is no number"),
        ({"RANK": "2"}, "the environment's RANK=2, WORLD_SIZE=2, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2 do not fit together"),
        (
            {"MASTER_ADDR": None},
            "RANK is set in the environment, and MASTER_ADDR not: the ranks cannot meet",
        ),
        ({"OUTLAST_JOURNAL": "here"}, "OUTLAST_JOURNAL=here or its key in the environment cannot be read"),
    ],
)
def test_what_no_launcher_tells(monkeypatch, changed, message):
    for name, text in (Launched(1, 2, 1, 2).environment() | MET | changed).items():
        monkeypatch.delenv(name, raising=False) if text is None else monkeypatch.setenv(name, text)
    with pytest.raises(UsageError) as caught:
        environment.launched()
    assert caught.value.what == message
    assert caught.value.fix
