"""The first thing to run: a run from text to words, in seconds."""

import json

import runs
from outlast import cli


def test_train_resume_generate_export(tmp_path, capsys):
    assert runs.train(tmp_path, "--train.stop-at", "4", "--checkpoint.every", "3") == 0
    first = capsys.readouterr().out
    assert "step  4/10" in first
    assert "the same command goes on from here" in first
    assert runs.train(tmp_path) == 0
    second = capsys.readouterr().out
    assert "going on from step-00000004" in second
    assert "step  5/10" in second
    assert "step  4/10" not in second
    folder = tmp_path / "run"
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in metrics if "loss" in line]
    assert len(losses) == 10
    assert losses[-1] < losses[0] - 1
    held_out = [line["held_out_loss"] for line in metrics if "held_out_loss" in line]
    assert held_out[-1] < held_out[0] - 1
    assert json.loads((folder / "outcome.json").read_text())["exit_code"] == 0

    assert cli.main(["generate", str(folder), "alpha", "--max-tokens", "5", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.startswith("alpha")
    assert cli.main(["export", str(folder), str(tmp_path / "hf")]) == 0
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in (tmp_path / "hf").iterdir()}


def test_done_is_done(tmp_path, capsys):
    assert runs.train(tmp_path, "--train.steps", "2") == 0
    before = runs.weights(tmp_path / "run")
    capsys.readouterr()
    assert runs.train(tmp_path, "--train.steps", "2") == 0
    out = capsys.readouterr().out
    assert "2 of 2" in out
    assert "step 1/2" not in out
    assert runs.equal(before, runs.weights(tmp_path / "run"))
