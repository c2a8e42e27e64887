"""Users' mistakes, each with the one message it gets: what, what to do, where. No traceback, nothing lost."""

import os
import subprocess
import sys

import pytest

import runs
from outlast import cli
from outlast.journal import Journal


def message(capsys, words):
    """Run a command that must fail. Returns its exit code and all it wrote to stderr."""
    code = cli.main(words)
    return code, capsys.readouterr().err


def golden(capsys, words, code, *lines):
    assert message(capsys, words) == (code, "error: " + "\n  ".join(lines) + "\n")


def test_an_unknown_knob_in_the_file(tmp_path, capsys):
    path = tmp_path / "run.toml"
    path.write_text("[optim]\nlearning_rate = 1e-3\nbeta3 = 0.9\n")
    golden(
        capsys,
        ["train", str(path)],
        2,
        "unknown setting optim.learning_rate",
        "known: optim.name, optim.lr, optim.beta1, optim.beta2, optim.eps, optim.momentum, optim.weight_decay, optim.clip",
        f"{path} [optim] learning_rate",
    )


def test_an_unknown_knob_on_the_command_line(capsys):
    golden(
        capsys,
        ["train", "--train.micro-bach", "4"],
        2,
        "unrecognized options: --train.micro-bach, 4",
        "perhaps you meant train.micro-batch; see outlast train --help",
    )


def test_a_run_file_that_is_not_there(tmp_path, capsys):
    (tmp_path / "tiny.toml").write_text("")
    golden(
        capsys,
        ["train", str(tmp_path / "tinny.toml")],
        2,
        f"there is no run file {tmp_path}/tinny.toml",
        f"perhaps you meant {tmp_path}/tiny.toml",
    )


def test_a_batch_that_does_not_divide(tmp_path, capsys):
    golden(
        capsys,
        runs.arguments(tmp_path, "--train.batch", "1000", "--train.batch-unit", "tokens"),
        2,
        "a batch of 1000 tokens is not a whole number of sequences of 32",
        "the nearest that divide: 992 (31 sequences) or 1024 (32 sequences)",
        "set by --train.batch",
    )
    assert not (tmp_path / "run").exists()


def test_heads_that_do_not_divide(tmp_path, capsys):
    golden(
        capsys,
        runs.arguments(tmp_path, "--model.num-heads", "12", "--model.num-kv-heads", "5"),
        2,
        "cannot share 5 key/value heads among 12 query heads",
        "num_kv_heads can be 1, 2, 3, 4, 6, 12",
        "set by --model.num-kv-heads",
    )


@pytest.mark.parametrize(
    ("knobs", "what", "fix"),
    [
        (
            ["--train.recompute", "full", "--train.recompute-layers", "3"],
            "cannot recompute 3 blocks: the model has 2",
            "set it to 2 or less, or to 0, which takes all of them",
        ),
        (
            ["--train.recompute-layers", "1"],
            "train.recompute_layers is 1, and train.recompute is none: nothing is recomputed in any block",
            "set train.recompute to attention or full, or leave train.recompute_layers out",
        ),
    ],
)
def test_blocks_that_cannot_be_recomputed(tmp_path, capsys, knobs, what, fix):
    golden(capsys, runs.arguments(tmp_path, *knobs), 2, what, fix, "set by --train.recompute-layers")


def test_a_layout_for_other_ranks_than_were_started(tmp_path, capsys, monkeypatch):
    told = {"RANK": 0, "WORLD_SIZE": 3, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 3, "MASTER_ADDR": "here", "MASTER_PORT": 1}
    for name, number in told.items():
        monkeypatch.setenv(name, str(number))
    path = tmp_path / "wide.toml"
    path.write_text("[parallel]\ntp = 2\n")
    golden(
        capsys,
        ["train", str(path), *runs.arguments(tmp_path, "--model.num-kv-heads", "2")[1:]],
        2,
        "the layout tp=2 is for 2 ranks, and 3 were started",
        "start 2 (torchrun --nproc-per-node 2), or set degrees whose product is 3",
        f"set in {path} [parallel] tp",
    )


@pytest.mark.parametrize(
    ("knobs", "what", "fix"),
    [
        (
            ["--model.num-heads", "12", "--model.num-kv-heads", "12", "--parallel.tp", "5"],
            "cannot split 12 attention heads over tp=5",
            "heads per rank must be whole: tp can be 1, 2, 3, 4, 6, 12",
        ),
        (
            ["--model.num-heads", "6", "--model.num-kv-heads", "3", "--parallel.tp", "2"],
            "cannot split 3 key/value heads over tp=2",
            "a key/value head's 2 query heads would be torn apart unevenly: tp can be 1, 3, 6",
        ),
        (
            ["--model.num-heads", "4", "--model.intermediate-size", "26", "--parallel.tp", "4"],
            "cannot split 26 feed-forward channels over tp=4",
            "channels per rank must be whole: tp can be 1, 2",
        ),
        (
            ["--data.sequence-length", "31", "--parallel.tp", "2", "--parallel.sp"],
            "cannot share 31 positions among tp=2 ranks under sequence parallelism",
            "nearest that divides: 30 or 32; or leave parallel.sp out (--parallel.no-sp)",
        ),
        (
            ["--parallel.sp"],
            "parallel.sp is on, and parallel.tp is 1: there is nobody to share the positions with",
            "set parallel.tp to 2 or more, or leave parallel.sp out (--parallel.no-sp)",
        ),
        (
            ["--parallel.links", "nowhere.json"],
            "parallel.links is 'nowhere.json', and there is no such file",
            'set it to "measure", to a links.json that a run has kept, or leave it out',
        ),
        (
            ["--parallel.sp-regather"],
            "parallel.sp_regather is on, and parallel.sp is not: there is nothing gathered to gather again",
            "set parallel.sp too, or leave both out",
        ),
        (
            ["--parallel.dp-compress", "topk"],
            "parallel.dp_compress is topk, and parallel.dp_replicate is 1: there are no copies to send gradients to",
            "set parallel.dp_replicate to 2 or more, or leave parallel.dp_compress out",
        ),
        (
            ["--parallel.dp-compress", "bf16", "--parallel.dp-shard", "2"],
            "parallel.dp_compress is bf16, and parallel.dp_replicate is 1: there are no copies to send gradients to",
            "under full sharding gradients travel inside FSDP's reduce-scatter, which is not compressed: "
            "set parallel.dp_replicate to 2 or more, or leave parallel.dp_compress out",
        ),
        (
            ["--parallel.dp-compress", "onebit", "--parallel.dp-replicate", "2", "--optim.name", "muon"],
            "parallel.dp_compress is onebit, and optim.name is muon: what 1-bit sends is AdamW's momentum",
            "set optim.name to adamw, or parallel.dp_compress to bf16 or topk",
        ),
        (
            ["--parallel.dp-exact-steps", "10", "--parallel.dp-compress", "onebit", "--parallel.dp-replicate", "2"],
            "the first 10 steps are sent exactly, and the run has 10: none would be sent in 1 bit",
            "lower parallel.dp_exact_steps, or leave parallel.dp_compress out",
        ),
        (["--parallel.dp-topk", "0"], "parallel.dp_topk is 0.0", "it must be more than 0 and at most 1"),
        (["--parallel.dp-topk", "1.01"], "parallel.dp_topk is 1.01", "it must be more than 0 and at most 1"),
        (["--parallel.dp-exact-steps", "0"], "parallel.dp_exact_steps is 0", "it must be more than 0"),
    ],
)
def test_layouts_that_do_not_fit(tmp_path, capsys, knobs, what, fix):
    origin = "set by --data.sequence-length" if "31" in knobs else f"set by {next(k for k in knobs if 'parallel' in k)}"
    golden(capsys, runs.arguments(tmp_path, *knobs), 2, what, fix, origin)


def test_an_empty_corpus(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    code, said = message(capsys, runs.arguments(tmp_path, "--data.sources", str(tmp_path / "empty")))
    assert code == 2
    assert said.startswith("error: ")
    assert str(tmp_path / "empty") in said
    assert said.count("\n") <= 3
    assert not (tmp_path / "run").exists()


def test_a_folder_that_holds_another_run(tmp_path, capsys):
    assert runs.train(tmp_path, "--train.steps", "2") == 0
    before = (tmp_path / "run" / "journal.jsonl").read_bytes()
    kept = runs.weights(tmp_path / "run")
    capsys.readouterr()
    for knob, key, old, new, way_on in (
        ("--model.num-layers", "model.num_layers", "2", "3", ""),
        ("--optim.lr", "optim.lr", "0.01", "0.02", ", or go on with the change: --train.allow-change"),
        ("--train.seed", "train.seed", "0", "1", ", or go on with the change: --data.allow-change"),
    ):
        golden(
            capsys,
            runs.arguments(tmp_path, "--train.steps", "2", knob, new),
            2,
            f"the run in {tmp_path}/run was begun with {key} = {old}, and this command has {new}",
            f"give this one another folder: --folder runs/NAME{way_on}",
            f"set by {knob}",
        )
    assert runs.equal(kept, runs.weights(tmp_path / "run"))
    lines = (tmp_path / "run" / "journal.jsonl").read_bytes()
    assert lines == before


def test_a_changed_corpus(tmp_path, capsys):
    assert runs.train(tmp_path, "--train.stop-at", "2") == 0
    (runs.corpus(tmp_path / "corpus") / "more.txt").write_text("one more document\n")
    capsys.readouterr()
    code, said = message(capsys, runs.arguments(tmp_path))
    assert code == 2
    assert "was begun with corpus = '" in said
    assert "--data.allow-change" in said
    assert runs.train(tmp_path, "--data.allow-change") == 0
    started = [line for line in runs.journal(tmp_path / "run") if line["event"] == "start"]
    assert [list(line["changed"]) for line in started] == [[], ["corpus"]]
    assert started[1]["changed"]["corpus"][0] == started[0]["corpus"]
    assert started[1]["changed"]["corpus"][1] == started[1]["corpus"]


def test_a_folder_in_use(tmp_path, capsys):
    held = Journal(tmp_path / "run" / "journal.jsonl")
    golden(
        capsys,
        runs.arguments(tmp_path),
        2,
        "another process is training in this run folder",
        "wait for it, end it, or give this run another folder: --folder runs/NAME",
        f"{tmp_path}/run",
    )
    held.close()


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path, small_disk, capsys):
    folder = ["--folder", str(small_disk / "run")]
    assert runs.train(tmp_path, *folder, "--train.stop-at", "2") == 0
    kept = runs.weights(small_disk / "run")
    (small_disk / "ballast").write_bytes(
        bytes(os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize - 40_000)
    )
    code, said = message(capsys, runs.arguments(tmp_path, *folder))
    assert code == 70
    assert said.startswith("error: cannot write")
    assert "No space left on device" in said
    assert "free some space" in said
    assert runs.equal(kept, runs.weights(small_disk / "run"))
    (small_disk / "ballast").unlink()
    assert runs.train(tmp_path, *folder) == 0
    assert runs.train(tmp_path, name="straight") == 0
    assert runs.equal(runs.weights(small_disk / "run"), runs.weights(tmp_path / "straight"))


def test_a_damaged_checkpoint(tmp_path, capsys):
    assert runs.train(tmp_path, "--train.stop-at", "2") == 0
    shard = next((tmp_path / "run" / "checkpoints").glob("step-*/*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    capsys.readouterr()
    code, said = message(capsys, runs.arguments(tmp_path))
    assert code == 70
    assert f"checkpoint step-00000002 is damaged: {shard.name} has" in said
    assert "move its folder away" in said


def test_a_loss_that_is_no_number(tmp_path, capsys):
    assert runs.train(tmp_path, "--train.stop-at", "2") == 0
    capsys.readouterr()
    code, said = message(
        capsys, runs.arguments(tmp_path, "--train.allow-change", "--optim.lr", "1e38", "--optim.clip", "0")
    )
    assert code == 70
    assert "the loss is nan" in said or "the loss is inf" in said
    assert "samples" in said
    assert ".txt" in said
    assert runs.journal(tmp_path / "run")[-1]["event"] == "end"


def test_cuda_where_there_is_none(tmp_path, capsys):
    golden(
        capsys,
        runs.arguments(tmp_path, "--train.device", "cuda"),
        2,
        "train.device is cuda, and torch finds no CUDA device",
        "set it to auto or cpu",
        "set by --train.device",
    )


def test_a_verb_there_is_not(capsys):
    golden(capsys, ["trian"], 2, "there is no verb 'trian'", "perhaps you meant train")


def test_a_run_there_is_not(tmp_path, capsys):
    golden(
        capsys,
        ["generate", str(tmp_path / "none"), "x"],
        2,
        f"{tmp_path}/none is not a run folder: it has no run.toml",
        "name one that outlast train has made",
    )


def test_generate_without_a_prompt(capsys):
    golden(capsys, ["generate", "runs/x"], 2, 'outlast generate takes RUN "PROMPT"', "see outlast generate --help")


def test_debug_shows_where_an_error_comes_from(capsys):
    assert cli.main(["trian", "--debug"]) == 2
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert "in dispatch" in said
    assert "error: there is no verb 'trian'" in said


@pytest.mark.parametrize("verb", ["train", "tokenize", "generate", "export"])
def test_help_is_for_a_person(verb):
    done = subprocess.run(
        [sys.executable, "-m", "outlast", verb, "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert f"outlast {verb}" in done.stdout
    assert "Traceback" not in done.stderr


def test_help_and_errors_come_fast_since_torch_is_not_loaded():
    code = "import sys; from outlast import cli; cli.main(['--help']); cli.main(['train', '--nope']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_what_ranks_would_refuse_is_refused_before_any_is_started(tmp_path, capsys):
    code, said = message(capsys, runs.arguments(tmp_path, "--parallel.dp-shard", "2147483648"))
    assert code == 2
    assert "2,147,483,648 ranks on this machine take 644,245,094 GB before anything is in them" in said
    assert "set by --parallel.dp-shard" in said
    assert not (tmp_path / "run").exists()
    assert runs.train(tmp_path, "--train.stop-at", "1") == 0
    code, said = message(capsys, runs.arguments(tmp_path, "--parallel.dp-shard", "2", "--optim.lr", "1"))
    assert code == 2
    assert "was begun with optim.lr = 0.01, and this command has 1.0" in said
    assert "rank 0" not in said
    assert "rank 1" not in said
    assert not (tmp_path / "run" / "logs").exists()
