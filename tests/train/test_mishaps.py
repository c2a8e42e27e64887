"""What else can befall a run: signals at odd times, files that are gone, odd names, a reader that leaves."""

import json
import os
import pty
import shutil
import signal
import subprocess
import sys

import pytest

import runs
from outlast import cli
from outlast.errors import StorageError
from outlast.journal import Journal
from outlast.train import command, loop


def test_sigterm_before_the_first_step_asks_to_be_started_again(tmp_path, monkeypatch, capsys):
    def asked(*args):
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(command, "settle", asked)
    assert runs.train(tmp_path) == 75
    assert "left at SIGTERM" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before


def test_sigterm_during_an_evaluation_leaves_a_checkpoint(tmp_path, monkeypatch):
    evaluate = loop.evaluate

    def asked(training, watchers):
        evaluate(training, watchers)
        if training.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(loop, "evaluate", asked)
    assert runs.train(tmp_path, "--eval.every", "4") == 75
    checkpoints = [line["step"] for line in runs.journal(tmp_path / "run") if line["event"] == "checkpoint"]
    assert checkpoints == [4]


def test_a_kill_before_the_last_evaluation_costs_nothing(tmp_path, monkeypatch):
    def killed(training, watchers):
        if training.step:
            raise KeyboardInterrupt

    evaluate = loop.evaluate
    monkeypatch.setattr(loop, "evaluate", killed)
    assert runs.train(tmp_path) == 130
    assert json.loads((tmp_path / "run" / "outcome.json").read_text())["exit_code"] == 130
    monkeypatch.setattr(loop, "evaluate", evaluate)
    assert runs.train(tmp_path) == 0
    steps = [(line["event"], line["step"]) for line in runs.journal(tmp_path / "run")]
    assert steps.count(("step", 10)) == 1
    assert ("evaluation", 10) in steps


def test_the_identity_is_in_the_checkpoint_too(tmp_path, capsys):
    assert runs.train(tmp_path, "--train.stop-at", "4") == 0
    (tmp_path / "run" / "identity.json").unlink()
    assert runs.train(tmp_path, "--train.seed", "9") == 2
    assert "was begun with train.seed = 0, and this command has 9" in capsys.readouterr().err
    (tmp_path / "run" / "identity.json").write_text('{"record": "identity", "version": 1, "knobs": []}')
    assert runs.train(tmp_path) == 2
    assert "the run's identity is damaged" in capsys.readouterr().err
    (tmp_path / "run" / "identity.json").unlink()
    assert runs.train(tmp_path) == 0


def test_a_change_that_was_allowed_is_journalled_and_a_kind_of_moments_never_changes(tmp_path, capsys):
    assert runs.train(tmp_path, "--train.stop-at", "4") == 0
    assert runs.train(tmp_path, "--optim.lr", "0.02", "--train.allow-change", "--train.stop-at", "5") == 0
    started = [line["changed"] for line in runs.journal(tmp_path / "run") if line["event"] == "start"]
    assert started == [{}, {"optim.lr": [0.01, 0.02]}]
    assert runs.train(tmp_path, "--optim.lr", "0.02", "--optim.name", "muon", "--train.allow-change") == 2
    assert "optim.name = 'adamw'" in capsys.readouterr().err


def test_a_moved_run_goes_on_where_it_lies(tmp_path):
    assert runs.train(tmp_path, "--train.stop-at", "4") == 0
    shutil.copytree(tmp_path / "run", tmp_path / "moved")
    before = (tmp_path / "run" / "journal.jsonl").read_bytes()
    assert cli.main(["train", str(tmp_path / "moved" / "run.toml"), "--train.stop-at", "6"]) == 0
    assert (tmp_path / "run" / "journal.jsonl").read_bytes() == before
    assert runs.journal(tmp_path / "moved")[-1]["step"] == 6


def test_the_outcome_is_never_that_of_a_start_before(tmp_path, monkeypatch):
    assert runs.train(tmp_path, "--train.stop-at", "4") == 0
    outcome = tmp_path / "run" / "outcome.json"
    assert json.loads(outcome.read_text())["step"] == 4
    seen = []
    monkeypatch.setattr(loop, "train", lambda *_: seen.append(outcome.exists()) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        runs.train(tmp_path)
    assert seen == [False]
    assert "ZeroDivisionError" in json.loads(outcome.read_text())["outcome"]


def test_a_last_line_that_cannot_be_written_is_told_once(tmp_path, monkeypatch, capsys):
    write = Journal.write

    def full(self, event, step, **fields):
        if event == "end":
            raise StorageError("cannot write the journal: No space left on device")
        write(self, event, step, **fields)

    monkeypatch.setattr(Journal, "write", full)
    assert runs.train(tmp_path) == 70
    assert capsys.readouterr().err == "error: cannot write the journal: No space left on device\n"
    assert runs.journal(tmp_path / "run")[-1]["event"] == "evaluation"


def test_odd_names_are_names(tmp_path, capsys):
    odd = runs.corpus(tmp_path / "we[ird")
    (odd / "bad[b].txt").write_bytes(b"\xff\xfe")
    assert runs.train(tmp_path, "--data.sources", str(odd), "--train.steps", "1", name="a[b]") == 0
    out = capsys.readouterr().out
    assert f"{odd}/bad[b].txt" in out
    assert f"{tmp_path}/a[b]" in out


def test_a_reader_that_leaves_does_not_end_the_run(tmp_path):
    command = [sys.executable, "-u", "-m", "outlast", *runs.arguments(tmp_path, "--train.steps", "40")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(60) == 0, process.stderr.read()
    assert runs.journal(tmp_path / "run")[-1]["outcome"] == "done"


def test_torn_metrics_do_not_spoil_the_next_line(tmp_path):
    assert runs.train(tmp_path, "--train.stop-at", "4") == 0
    path = tmp_path / "run" / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"step": 5, "lo')
    assert runs.train(tmp_path) == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["attempt"], line["step"]) for line in lines if "loss" in line] == [
        *((1, step) for step in range(1, 5)),
        *((2, step) for step in range(5, 11)),
    ]


def test_a_model_that_could_never_fit(tmp_path, capsys):
    assert runs.train(tmp_path, "--model.vocab-size", "2000000000") == 2
    assert "weights, gradients and moments take 512.0 GB" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_terminal_that_is_closed_does_not_end_the_run(tmp_path):
    """Writing to it then fails with an input/output error, where a pipe would be broken."""
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "outlast", *runs.arguments(tmp_path, "--train.steps", "60")]
    with subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True) as process:
        os.close(theirs)
        said = b""
        while b"step  5/60" not in said:
            said += os.read(ours, 4096)
        os.close(ours)
        assert process.wait(timeout=60) == 0
    assert runs.journal(tmp_path / "run")[-1]["outcome"] == "done"
