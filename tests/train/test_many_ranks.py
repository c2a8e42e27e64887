"""`outlast train` on several ranks, as a user starts it: real processes, real signals, and what the run's folder then holds."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import runs
from outlast.journal import surviving

HARD = ["--train.batch", "6", "--train.micro-batch", "2", "--model.dropout", "0.1", "--checkpoint.every", "4"]
TWO = ["--parallel.tp", "2", "--parallel.sp", "--model.num-kv-heads", "2"]
LONG = ["--train.steps", "400", "--schedule.warmup", "2"]


def started(tmp_path: Path, *more: str, name: str = "run") -> subprocess.Popen:
    """The command, with its output in a file: a pipe that nobody reads would fill up."""
    words = [sys.executable, "-m", "outlast", *runs.arguments(tmp_path, *HARD, *TWO, *more, name=name)]
    with (tmp_path / f"{name}.out").open("w") as out:
        return subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, text=True)


def said(tmp_path: Path, name: str = "run") -> str:
    return (tmp_path / f"{name}.out").read_text()


def until_step(process: subprocess.Popen, folder: Path, step: int) -> None:
    """Wait until the journal tells of a step; pytest's own limit ends a wait for nothing."""
    while process.poll() is None:
        path = folder / "journal.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        if any('"event": "step"' in line and json.loads(line)["step"] >= step for line in lines):
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
    raise AssertionError(f"the run ended with {process.returncode} before step {step}")


def ranks_of(folder: Path) -> dict[int, int]:
    """Process numbers of the run's ranks, by rank, from their environments."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            told = dict(one.split("=", 1) for one in path.read_text(errors="replace").split("\0") if "=" in one)
            command = (path.parent / "cmdline").read_text()
        except OSError:
            continue
        if "OUTLAST_JOURNAL" in told and str(folder) in command:
            found[int(told["RANK"])] = int(path.parent.name)
    return found


@pytest.fixture
def ended(tmp_path):
    """Processes that a test starts; none outlives it."""
    processes: list[subprocess.Popen] = []
    yield processes
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()


def test_two_ranks_equal_one_process_and_count_what_they_send(tmp_path, ended):
    ended.append(started(tmp_path))
    assert ended[0].wait() == 0, said(tmp_path)
    assert runs.train(tmp_path, *HARD, "--model.num-kv-heads", "2", name="alone") == 0
    ours, alone = runs.weights(tmp_path / "run"), runs.weights(tmp_path / "alone")
    assert ours.keys() == alone.keys()
    for name, tensor in alone.items():
        assert (ours[name] - tensor).norm() <= 1e-4 * tensor.norm(), name
    steps = [surviving(runs.journal(tmp_path / name)) for name in ("run", "alone")]
    assert [(line["samples"], line["fed"]) for line in steps[0]] == [
        (line["samples"], line["fed"]) for line in steps[1]
    ]
    words = said(tmp_path)
    assert "tp 2 = 2 ranks, sequence parallel" in words
    assert words.count("the formula to the byte") == 2  # over tp, and of all ranks
    assert "step  1/10" in (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    assert json.loads((tmp_path / "run" / "outcome.json").read_text())["outcome"] == "done"
    numbers = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["comm.tp.all_gather.bytes"] > 0 for line in numbers if "loss" in line)


def test_a_rank_that_is_killed_is_the_cause_and_the_same_command_goes_on(tmp_path, ended):
    ended.append(started(tmp_path, *LONG))
    until_step(ended[0], tmp_path / "run", 6)
    ranks = ranks_of(tmp_path / "run")
    os.kill(ranks[1], signal.SIGKILL)
    assert ended[0].wait(timeout=15) == 75
    assert "error: rank 1 was ended by SIGKILL" in said(tmp_path)
    assert "Traceback" not in said(tmp_path)
    assert not ranks_of(tmp_path / "run"), "no rank lives on"
    told = runs.journal(tmp_path / "run")
    assert [line["rank"] for line in told if line["event"] == "fault"] == [1]
    last = told[-1]["step"]
    ended.append(started(tmp_path, *LONG, "--train.stop-at", str(last + 4)))
    assert ended[1].wait() == 0, said(tmp_path)
    lines = surviving(runs.journal(tmp_path / "run"))
    assert [line["samples"] for line in lines] == [[6 * i, 6 * i + 6] for i in range(last + 4)]


@pytest.mark.slow
def test_sigterm_saves_on_all_ranks_and_the_end_is_bitwise_that_of_an_uncut_run(tmp_path, ended):
    ended.append(started(tmp_path, *LONG))
    until_step(ended[0], tmp_path / "run", 6)
    ended[0].send_signal(signal.SIGTERM)
    assert ended[0].wait(timeout=30) == 75, said(tmp_path)
    stopped = runs.journal(tmp_path / "run")[-1]
    assert stopped["outcome"] == "left at SIGTERM"
    more = [*LONG, "--train.stop-at", str(stopped["step"] + 3)]
    for name in ("run", "uncut"):
        ended.append(started(tmp_path, *more, name=name))
        assert ended[-1].wait() == 0, said(tmp_path, name)
    assert runs.equal(runs.weights(tmp_path / "run"), runs.weights(tmp_path / "uncut"))


@pytest.mark.slow
def test_torchrun_starts_the_ranks_as_well(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "outlast"]
    words = [*torchrun, *runs.arguments(tmp_path, *HARD, *TWO)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "outcome.json").read_text()) | {"step": 10} == {
        "record": "outcome", "version": 1, "outcome": "done", "exit_code": 0, "step": 10,
    }  # fmt: skip
    assert len(surviving(runs.journal(tmp_path / "run"))) == 10


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_compiled_run_on_two_ranks(tmp_path, ended, recompute):
    ended.append(started(tmp_path, "--train.compile", "--train.steps", "3", "--train.recompute", recompute))
    assert ended[0].wait() == 0, said(tmp_path)
    assert runs.train(tmp_path, *HARD, "--model.num-kv-heads", "2", "--train.steps", "3", name="alone") == 0
    ours, alone = runs.weights(tmp_path / "run"), runs.weights(tmp_path / "alone")
    for name, tensor in alone.items():
        if name.startswith("model."):
            assert (ours[name] - tensor).norm() <= 1e-4 * tensor.norm(), name
