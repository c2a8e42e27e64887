"""Resume: a run cut at any step, however it was left, ends bit for bit as one that was not."""

import json
import signal
import subprocess
import sys

import numpy as np
import pytest

import runs
from outlast import config, settings
from outlast.config import Run
from outlast.data import batches
from outlast.data.tokens import open_tokenizer, prepare
from outlast.journal import surviving

HARD = ["--train.batch", "6", "--train.micro-batch", "2", "--model.dropout", "0.1"]  # accumulation 3


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    assert runs.train(folder, *HARD) == 0
    return folder


@pytest.mark.parametrize(
    ("optimizer", "cut"), [*(("adamw", cut) for cut in range(1, 10)), *(("muon", cut) for cut in (1, 4, 9))]
)
def test_every_cut(whole, tmp_path, cut, optimizer):
    if optimizer == "muon":
        whole = tmp_path / "whole"
        assert runs.train(whole, *HARD, "--optim.name", "muon") == 0
    more = [*HARD, "--optim.name", optimizer]
    assert runs.train(tmp_path, *more, "--train.stop-at", str(cut)) == 0
    assert runs.train(tmp_path, *more) == 0
    assert runs.equal(runs.weights(tmp_path / "run"), runs.weights(whole / "run"))
    steps = [surviving(runs.journal(folder / "run")) for folder in (tmp_path, whole)]
    assert [(line["samples"], line["fed"], line["loss"]) for line in steps[0]] == [
        (line["samples"], line["fed"], line["loss"]) for line in steps[1]
    ]


@pytest.mark.parametrize("more", [["--train.micro-batch", "6"], ["--train.threads", "2"]])
def test_other_passes_or_threads_feed_the_same_and_differ_by_rounding_only(whole, tmp_path, more):
    assert runs.train(tmp_path, *HARD, *more) == 0
    one, other = runs.weights(tmp_path / "run"), runs.weights(whole / "run")
    for name in one:
        if name.startswith("model."):
            assert (one[name] - other[name]).norm() <= 1e-4 * other[name].norm(), name
    fed = [[line["fed"] for line in surviving(runs.journal(folder / "run"))] for folder in (tmp_path, whole)]
    assert fed[0] == fed[1]


def test_what_the_journal_says_was_fed_is_what_the_corpus_holds(whole):
    """Recomputed from the token files alone: order, packing and targets by their definitions."""
    lines = surviving(runs.journal(whole / "run"))
    assert [line["samples"] for line in lines] == [[6 * i, 6 * i + 6] for i in range(10)]
    run = config.replaced(Run(), settings.read_file(whole / "run" / "run.toml"))
    tokenizer = open_tokenizer(run.data, "")
    stream = prepare(run.data, tokenizer).groups[0].train
    tokens, ends = stream.read(0, len(stream)).astype(np.int64), set(stream.ends.tolist())
    feed = batches.Feed(prepare(run.data, tokenizer), run.data, run.train.seed, tokenizer.eos)
    for line in lines:
        total = 0
        for position in range(*line["samples"]):
            start = feed.order.at(position).sample * 32
            part = tokens[start : start + 32]
            padded = np.concatenate([part, np.full(32 - len(part), tokenizer.eos)])
            targets = np.array(
                [-100 if t + 1 in ends or t + 1 >= len(tokens) else tokens[t + 1] for t in range(start, start + 32)]
            )
            total += batches.fed(position, padded, targets)
        assert line["fed"] == f"{total % 2**64:016x}"


def follow(process, until):
    """Read a run's lines until one begins so."""
    seen = []
    for line in process.stdout:
        seen.append(line)
        if line.startswith(until):
            return seen
    raise AssertionError("".join(seen))


def start(tmp_path, *more):
    # Steps that take a while, so that a signal finds the run among them.
    command = [sys.executable, "-u", "-m", "outlast", *runs.arguments(tmp_path, *HARD, *more)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_left_by_a_signal(tmp_path, number):
    slow = ["--train.steps", "400", "--checkpoint.every", "5"]
    process = start(tmp_path, *slow)
    try:
        follow(process, "step   7/400")
        process.send_signal(number)
        rest = process.communicate(timeout=60)[0]
    finally:
        process.kill()
    expected = {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 75, signal.SIGINT: 130}
    assert process.returncode == expected[number], rest
    folder = tmp_path / "run"
    if number != signal.SIGKILL:
        assert f"left at {signal.Signals(number).name}" in rest
        last = max(line["step"] for line in runs.journal(folder) if line["event"] == "step")
        assert runs.journal(folder)[-1]["event"] == "end"
        assert [line["step"] for line in runs.journal(folder) if line["event"] == "checkpoint"][-1] == last
    stop = ["--train.stop-at", str(max(line["step"] for line in runs.journal(folder)) + 6)]
    assert runs.train(tmp_path, *HARD, *slow, *stop) == 0
    assert runs.train(tmp_path, *HARD, *slow, *stop, name="straight") == 0
    assert runs.equal(runs.weights(folder), runs.weights(tmp_path / "straight"))
    fed = [
        [(line["step"], line["fed"]) for line in surviving(runs.journal(tmp_path / name))]
        for name in ("run", "straight")
    ]
    assert fed[0] == fed[1]


def test_a_run_begun_before_a_knob_was_there_goes_on(tmp_path):
    assert runs.train(tmp_path, "--train.stop-at", "2") == 0
    path = tmp_path / "run" / "identity.json"
    identity = json.loads(path.read_text())
    del identity["knobs"]["parallel.dp_compress"]
    path.write_text(json.dumps(identity))
    assert runs.train(tmp_path, "--train.stop-at", "3") == 0
    assert runs.train(tmp_path, "--parallel.dp-compress", "bf16", "--parallel.dp-replicate", "2") == 2
