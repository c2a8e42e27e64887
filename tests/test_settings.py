"""What users write is read as they mean it, or refused in one line."""

import dataclasses
import math
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast import config, records, settings
from outlast.config import Run, knobs
from outlast.errors import UsageError, nearest


def test_every_knob_is_documented_and_they_stay_few():
    listed = list(knobs())
    assert all(knob.help.endswith(".") for knob in listed)
    assert len({knob.key for knob in listed}) == len(listed)
    of_train = [knob.key for knob in listed if not knob.key.startswith("model.")]
    assert len(of_train) < 80


def test_the_run_file_written_is_the_run_read(tmp_path):
    run = config.replaced(
        Run(),
        {
            "folder": "runs/a",
            "optim.lr": 2e-4,
            "data.sources": ("a", 'b "c"'),
            "data.weights": (1.0, 0.5),
            "model.qk_norm": True,
        },
    )
    (tmp_path / "run.toml").write_text(records.run_file(run))
    assert config.replaced(Run(), settings.read_file(tmp_path / "run.toml")) == run


def write(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "what", "fix"),
    [
        ("[optim]\nxyz = 1", "unknown setting optim.xyz", "known: optim.name, optim.lr"),
        ("[optim]\nmicro_batch = 1", "unknown setting optim.micro_batch", "perhaps you meant train.micro_batch"),
        ("[optim]\nbeta_1 = 1", "unknown setting optim.beta_1", "perhaps you meant optim.beta1"),
        ("[optin]\nlr = 1.0", "unknown setting optin.lr", "perhaps you meant optim.lr"),
        ("folders = 'x'", "unknown setting folders", "perhaps you meant folder"),
        ("[optim]\nlr = 'fast'", "optim.lr is 'fast'", "it takes a number"),
        ("[train]\nsteps = 1.5", "train.steps is 1.5", "it takes a whole number"),
        ("[train]\ncompile = 1", "train.compile is 1", "it takes true or false"),
        ("[data]\nsources = 'x'", "data.sources is 'x'", "it takes a list of strings"),
        ("[data]\nsources = [1]", "data.sources is \\[1\\]", "it takes a list of strings"),
        ("[optim]\nname = 'sgd'", "optim.name is 'sgd'", "it takes one of adamw, muon"),
        ("[optim", "cannot read the run file", ""),
        ("optim = 3", "unknown setting optim", ""),
    ],
)
def test_a_bad_run_file(tmp_path, text, what, fix):
    with pytest.raises(UsageError, match=what) as caught:
        settings.read_file(write(tmp_path, text))
    assert fix in caught.value.fix
    assert str(tmp_path) in caught.value.where


def test_a_missing_run_file_names_the_nearest(tmp_path):
    write(tmp_path, "")
    with pytest.raises(UsageError, match="there is no run file") as caught:
        settings.read_file(tmp_path / "rum.toml")
    assert "run.toml" in caught.value.fix


def test_whole_numbers_serve_as_numbers(tmp_path):
    assert settings.read_file(write(tmp_path, "[optim]\nlr = 1")) == {"optim.lr": 1.0}


@pytest.mark.parametrize(
    ("args", "what"),
    [
        (["--optim.lrr", "3"], "--optim.lrr"),
        (["--optim.lr", "x"], "--optim.lr"),
        (["--optim.name", "sgd"], "sgd"),
        (["--train.steps"], "--train.steps"),
        (["stray"], "stray"),
    ],
)
def test_a_bad_command_line(args, what):
    with pytest.raises(UsageError) as caught:
        settings.read_command_line(Run, args, Run(), "outlast train")
    assert what in caught.value.what
    assert "\n" not in caught.value.what
    assert "│" not in str(caught.value)


def test_a_mistyped_flag_names_the_nearest():
    with pytest.raises(UsageError) as caught:
        settings.read_command_line(Run, ["--train.micro-bach", "3"], Run(), "outlast train")
    assert "perhaps you meant train.micro-batch" in caught.value.fix


@given(st.integers(1, 10**7), st.integers(1, 10**5))
def test_a_batch_in_tokens_is_whole_sequences_or_names_the_nearest(batch, length):
    run = config.replaced(Run(), {"train.batch": batch, "train.batch_unit": "tokens", "data.sequence_length": length})
    if batch % length == 0:
        assert settings.batch_sequences(run) == batch // length
        return
    with pytest.raises(UsageError) as caught:
        settings.batch_sequences(run)
    below, above = batch // length * length, batch // length * length + length
    assert f"{above}" in caught.value.fix
    assert not below or f"{below} ({below // length} sequences)" in caught.value.fix


@pytest.mark.parametrize(
    ("key", "given"),
    [
        ("train.steps", 0), ("train.batch", -1), ("optim.lr", -1e-3), ("optim.lr", float("nan")), ("optim.lr", float("inf")),
        ("model.dropout", 1.0), ("data.held_out", 1.0), ("schedule.final", 1.5), ("data.sources", ()), ("data.weights", (1.0, 2.0)),
        ("data.weights", (0.0,)), ("model.head_dim", 5), ("model.num_kv_heads", 3), ("data.sequence_length", 0),
        ("model.rope_theta", 1.0), ("train.stop_at", 201),
    ],
)  # fmt: skip
def test_values_no_run_could_use(key, given):
    with pytest.raises(UsageError) as caught:
        settings.check(config.replaced(Run(), {"folder": "x", key: given}))
    assert caught.value.key == key


def test_values_that_do_not_fit_each_other():
    for values, key in (
        ({"schedule.name": "wsd", "schedule.warmup": 150, "schedule.decay": 51}, "schedule.decay"),
        ({"model.rope_scaling": "llama3", "model.rope_low": 4.0}, "model.rope_low"),
        ({"model.rope_scaling": "yarn", "model.rope_low": 0.0}, "model.rope_low"),
    ):
        with pytest.raises(UsageError) as caught:
            settings.check(config.replaced(Run(), {"folder": "x"} | values))
        assert caught.value.key == key


def test_defaults_pass():
    settings.check(config.replaced(Run(), {"folder": "runs/x"}))


def test_every_number_has_a_range():
    """A knob whose negative, endless or enormous value is accepted would be one nobody thought about."""
    for knob in knobs():
        if knob.type in (int, float):
            assert knob.within, knob.key
            for bad in (-1, *([math.nan, math.inf] if knob.type is float else [1 << 64])):
                with pytest.raises(UsageError) as caught:
                    settings.check(config.replaced(Run(), {"folder": "x", knob.key: knob.type(bad)}))
                assert caught.value.key == knob.key


@pytest.mark.parametrize("key", ["folder", "data.cache", "data.text_field"])
def test_empty_words(key):
    with pytest.raises(UsageError, match=key):
        settings.check(config.replaced(Run(), {"folder": "x", key: ""}))


def test_result_knobs_are_marked():
    marked = config.result_knobs(Run())
    assert {"optim.lr", "model.hidden_size", "data.sequence_length", "train.seed", "train.batch"} <= set(marked)
    assert not {"folder", "train.micro_batch", "train.threads", "checkpoint.every", "parallel.tp", "data.cache"} & set(
        marked
    )


def test_nearest():
    assert nearest("optim.lrr", ["optim.lr", "train.steps"]) == "perhaps you meant optim.lr"
    assert nearest("zzz", ["a", "b"]) == "known: a, b"


def test_runs_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Run().optim.lr = 1.0


def test_a_record_is_whole_and_of_its_version(tmp_path):
    path = tmp_path / "deep" / "x.json"
    records.write_json(path, "thing", 2, {"a": 1})
    assert records.read_json(path, "thing", 2)["a"] == 1
    assert [p.name for p in path.parent.iterdir()] == ["x.json"]
    for record, version in (("thing", 3), ("other", 2)):
        with pytest.raises(records.OutlastError, match="this is record"):
            records.read_json(path, record, version)
    path.write_text("{")
    with pytest.raises(records.OutlastError, match="cannot read"):
        records.read_json(path, "thing", 2)


def test_toml_keeps_small_numbers_as_numbers():
    assert tomllib.loads(records.run_file(config.replaced(Run(), {"optim.lr": 3e-7})))["optim"]["lr"] == 3e-7
