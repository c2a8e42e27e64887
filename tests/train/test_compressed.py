"""`outlast train` with copies that send less than all: cut and gone on with, changed on the way, and what is said of it."""

import json

import pytest

import runs
from outlast.journal import surviving

ONEBIT = ["--parallel.dp-replicate", "2", "--parallel.dp-compress", "onebit", "--parallel.dp-exact-steps", "3"]


@pytest.mark.slow
def test_a_run_in_1_bit_is_cut_gone_on_with_and_changed(tmp_path, capfd):
    """capfd: the ranks are processes of their own."""
    assert runs.train(tmp_path, *ONEBIT, name="straight") == 0
    said = capfd.readouterr().out
    assert "compression: dp_replicate sends gradients exactly for 3 steps, then momentum as signs and scales" in said
    assert "The result depends on it, and on dp_replicate 2" in said
    assert "dp_replicate: " in said
    assert said.count("the formula to the byte") == 2  # world, dp_replicate: exact steps and others
    assert runs.train(tmp_path, *ONEBIT, "--train.stop-at", "6") == 0
    capfd.readouterr()

    # Without what the copies still owe one another it would be another run.
    none = [*ONEBIT[:2], "--parallel.dp-compress", "none", *ONEBIT[4:]]
    assert runs.train(tmp_path, *none) == 2
    assert capfd.readouterr().err == (
        f"error: the run in {tmp_path}/run was begun with parallel.dp_compress = 'onebit', and this command has 'none'\n"
        "  give this one another folder: --folder runs/NAME, or go on with the change: --train.allow-change, "
        "which lets go of what the copies have not sent yet\n"
        "  set by --parallel.dp-compress\n"
    )
    assert runs.train(tmp_path, *ONEBIT[:4], "--parallel.dp-exact-steps", "4") == 2
    assert "begun with parallel.dp_exact_steps = 3, and this command has 4" in capfd.readouterr().err

    assert runs.train(tmp_path, *ONEBIT) == 0
    assert runs.equal(runs.weights(tmp_path / "run"), runs.weights(tmp_path / "straight"))
    owed = [name for name in runs.weights(tmp_path / "run") if name.startswith("owed.onebit.")]
    assert "owed.onebit.embed_tokens.weight" in owed
    losses = [[line["loss"] for line in surviving(runs.journal(tmp_path / name))] for name in ("run", "straight")]
    assert losses[0] == losses[1]

    more = ["--train.steps", "12", "--train.allow-change"]
    assert runs.train(tmp_path, *none, *more) == 0
    start = [line for line in runs.journal(tmp_path / "run") if line["event"] == "start"][-1]
    assert start["changed"]["parallel.dp_compress"] == ["onebit", "none"]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = {line["step"]: line for line in lines if "lr" in line}
    assert "comm.dp_replicate.all_to_all.bytes" in steps[10]
    assert "comm.dp_replicate.all_reduce.bytes" in steps[11]
