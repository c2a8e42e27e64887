"""What a user can switch on: views of the metrics, a trace, compilation, other types, masked prompts, mixtures."""

import json
import math
import subprocess
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import runs
from outlast import cli


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder):
    return [line["loss"] for line in metrics(folder) if "loss" in line]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    assert runs.train(folder, "--train.steps", "5") == 0
    return losses(folder / "run")


def test_tensorboard_shows_what_metrics_jsonl_says(tmp_path):
    assert runs.train(tmp_path, "--train.steps", "3", "--log.tensorboard") == 0
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3]
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(losses(tmp_path / "run"), rel=1e-6)
    assert len(events.Scalars("held_out_loss")) == 2


def test_wandb_is_a_view_too(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    assert runs.train(tmp_path, "--train.steps", "2", "--log.wandb", "outlast-test") == 0
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*"))


def test_a_missing_extra_is_named(tmp_path, monkeypatch, capsys):
    import builtins

    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith(("wandb", "torch.utils.tensorboard")):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    assert runs.train(tmp_path, "--log.tensorboard") == 2
    assert "pip install 'outlast[tensorboard]'" in capsys.readouterr().err
    assert runs.train(tmp_path, "--log.wandb", "x") == 2
    assert "pip install 'outlast[wandb]'" in capsys.readouterr().err


def test_profile_writes_a_trace(tmp_path):
    assert runs.train(tmp_path, "--train.steps", "6", "--profile") == 0
    trace = json.loads((tmp_path / "run" / "trace.json").read_text())
    names = {event.get("name", "") for event in trace["traceEvents"]}
    assert any("addmm" in name or "mm" in name for name in names)


def test_a_run_too_short_for_a_trace_says_so(tmp_path, capsys):
    assert runs.train(tmp_path, "--train.steps", "3", "--profile") == 2
    assert "--profile takes 5 steps" in capsys.readouterr().err


@pytest.mark.slow
def test_compiled_blocks_compute_the_same_and_the_time_is_told(tmp_path, plain):
    # In a process of its own: torch.compile cannot look into the type checks that the tests switch on.
    command = [sys.executable, "-m", "outlast", *runs.arguments(tmp_path, "--train.steps", "5", "--train.compile")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "compilation: " in done.stdout
    assert losses(tmp_path / "run") == pytest.approx(plain, rel=1e-4)


@pytest.mark.parametrize(("dtype", "near"), [("float64", 1e-4), ("bfloat16", 0.03)])
def test_other_types_learn_the_same(tmp_path, plain, dtype, near):
    assert runs.train(tmp_path, "--train.steps", "5", "--train.dtype", dtype) == 0
    assert losses(tmp_path / "run") == pytest.approx(plain, rel=near)
    wanted = "torch.float64" if dtype == "float64" else "torch.float32"
    assert {str(t.dtype) for n, t in runs.weights(tmp_path / "run").items() if not n.endswith(".step")} == {wanted}


def test_deterministic_runs(tmp_path, plain):
    assert runs.train(tmp_path, "--train.steps", "5", "--train.deterministic") == 0
    assert losses(tmp_path / "run") == plain


@pytest.mark.parametrize("kind", ["attention", "full"])
def test_what_is_recomputed_learns_the_same_bits_and_a_dry_run_tells_what_is_kept(tmp_path, plain, kind, capsys):
    knobs = ["--train.recompute", kind, "--train.recompute-layers", "1"]
    assert runs.train(tmp_path, "--dry-run", *knobs) == 0
    assert f"recompute: {kind} in 1 of 2 blocks; kept and worked out again at once: none " in capsys.readouterr().out
    assert runs.train(tmp_path, "--train.steps", "5", *knobs) == 0
    assert losses(tmp_path / "run") == plain


def test_dry_run_shows_and_leaves_nothing(tmp_path, capsys):
    assert runs.train(tmp_path, "--dry-run") == 0
    out = capsys.readouterr().out
    assert "[optim]" in out
    assert "lr = 0.01" in out
    assert "vocab_size = 257" in out  # as resolved
    # 257 x 16 + 2 x (16 x (2 x 16 + 2 x 8) + 3 x 16 x 24 + 2 x 16) + 16 = 8,032
    assert "8.03 kparameters" in out
    assert "weights 32.1 kB" in out
    assert not (tmp_path / "run").exists()


def test_only_answers_are_learned(tmp_path):
    """Prompts of noise, answers always the same: the loss falls to nothing, as it could not if prompts counted."""
    import random

    draw = random.Random(0)
    with open(tmp_path / "chat.jsonl", "w") as file:
        for _ in range(200):
            prompt = "".join(draw.choices("abcdefghij", k=12))
            file.write(json.dumps({"prompt": prompt, "completion": "=yes"}) + "\n")
    more = [
        "--data.sources",
        str(tmp_path / "chat.jsonl"),
        "--data.packing",
        "whole",
        "--train.steps",
        "60",
        "--optim.lr",
        "0.03",
    ]
    assert runs.train(tmp_path, *more) == 0
    assert losses(tmp_path / "run")[-1] < 0.1 < math.log(10)


def test_a_mixture_keeps_its_shares_to_the_sample(tmp_path):
    one, other = runs.corpus(tmp_path / "one", seed=1), runs.corpus(tmp_path / "other", seed=2)
    more = ["--data.sources", str(one), str(other), "--data.weights", "3", "1"]
    assert runs.train(tmp_path, *more, "--train.steps", "4") == 0
    from outlast import config, settings
    from outlast.config import Run
    from outlast.data.batches import Feed
    from outlast.data.tokens import open_tokenizer, prepare

    run = config.replaced(Run(), settings.read_file(tmp_path / "run" / "run.toml"))
    tokenizer = open_tokenizer(run.data, "")
    feed = Feed(prepare(run.data, tokenizer), run.data, 0, tokenizer.eos)
    groups = [feed.order.at(position).group for position in range(16)]
    assert groups.count(0) == 12


def test_muon_and_schedules_run(tmp_path):
    assert runs.train(tmp_path, "--optim.name", "muon", "--schedule.name", "wsd", "--schedule.decay", "4") == 0
    lines = [line for line in metrics(tmp_path / "run") if "lr" in line]
    assert [line["lr"] for line in lines] == pytest.approx(
        [0.005, 0.01, 0.01, 0.01, 0.01, 0.01, *(0.01 * (1 - 0.9 * k / 4) for k in (1, 2, 3, 4))]
    )
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5


def test_tokenize_ahead_and_train_on_it(tmp_path, capsys):
    words = runs.arguments(tmp_path)[1:]
    assert cli.main(["tokenize", *words]) == 0
    out = capsys.readouterr().out
    assert "to learn from" in out
    assert "fingerprint" in out
    before = sorted((tmp_path / "cache").rglob("*.bin"))
    assert runs.train(tmp_path, "--train.steps", "1") == 0
    assert sorted((tmp_path / "cache").rglob("*.bin")) == before


def test_nothing_held_out_is_said(tmp_path, capsys):
    assert runs.train(tmp_path, "--train.steps", "1", "--data.held-out", "0") == 0
    assert "n/a: no document is held out" in capsys.readouterr().out
