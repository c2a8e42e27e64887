"""What a user set, read and checked: the run file, the command line, and what no run could use."""

import contextlib
import dataclasses
import io
import math
import tomllib
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from outlast.config import Knob, Run, knobs, value
from outlast.errors import UsageError, nearest


def _fits(kind: Any, given: Any) -> Any:
    """Take a TOML value as a knob's type, or return None where it is of another."""
    if typing.get_origin(kind) is Literal:
        return given if given in typing.get_args(kind) else None
    if typing.get_origin(kind) is tuple:
        items = [_fits(typing.get_args(kind)[0], item) for item in given] if isinstance(given, list) else [None]
        return None if None in items else tuple(items)
    if kind is float and type(given) is int:
        return float(given)
    return given if type(given) is kind else None


def _type_name(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(kind)))
    if typing.get_origin(kind) is tuple:
        return f"a list of {_type_name(typing.get_args(kind)[0]).removeprefix('a ')}s"
    return {float: "a number", int: "a whole number", bool: "true or false", str: "a string"}[kind]


def read_file(path: Path) -> dict[str, Any]:
    """The knobs a run file sets, by dotted key, each known and of its type.

    Raises:
        UsageError: the file is not there, is not TOML, or sets what is unknown or of another type.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        beside = sorted(str(other) for other in path.parent.glob("*.toml")) if path.parent.is_dir() else []
        raise UsageError(f"there is no run file {path}", fix=nearest(str(path), beside) if beside else "") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise UsageError(f"cannot read the run file: {error}", where=str(path)) from None
    flat: dict[str, Any] = {}
    for name, entry in table.items():
        flat |= {f"{name}.{key}": given for key, given in entry.items()} if isinstance(entry, dict) else {name: entry}
    known = {knob.key: knob for knob in knobs()}
    for key, given in flat.items():
        section, _, name = key.rpartition(".")
        where = f"{path} [{section}] {name}" if section else f"{path} {name}"
        if key not in known:
            raise UsageError(f"unknown setting {key}", fix=nearest(key, known), where=where)
        flat[key] = _fits(known[key].type, given)
        if flat[key] is None:
            raise UsageError(f"{key} is {given!r}", fix=f"it takes {_type_name(known[key].type)}", where=where)
    return flat


def read_command_line(command: type, args: Sequence[str], default: Any, prog: str) -> Any:
    """Parse a verb's arguments over its dataclass.

    Args:
        command: the frozen dataclass that lists what the verb takes.
        args: the words after the verb.
        default: an instance holding what stands where the command line is silent.
        prog: how the verb is called, for the help.

    Raises:
        UsageError: a word is unknown, or its value cannot be read; the library's own words, without its box.
    """
    import tyro  # here, since only a command line needs it

    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(command, args=list(args), default=default, prog=prog)
    except SystemExit as leaving:
        if not leaving.code:
            raise
        # A title, the error, a rule, hints; the box around it is blank where the terminal has no such characters.
        said = [line.strip("│ ") for line in box.getvalue().splitlines()[1:]]
        said = [line for line in said if line]
        rule = next((i for i, line in enumerate(said) if i and not set(line) - set("─-")), len(said))
        first = " ".join(line for line in said[:rule] if set(line) - set("─-"))
        words = [word for word in args if word.startswith("--") and word.split("=")[0] in first]
        keys = (
            [knob.key for knob in knobs()]
            if isinstance(default, Run)
            else [f.name for f in dataclasses.fields(command)]
        )
        fix = f"see {prog} --help"
        if "nrecognized" in first and words:
            fix = nearest(words[0].removeprefix("--").replace("-", "_"), keys).replace("_", "-") + f"; {fix}"
        raise UsageError(first[:1].lower() + first[1:], fix=fix) from None


def batch_sequences(run: Run) -> int:
    """Sequences in a step.

    Raises:
        UsageError: the batch is not at least one sequence, or its tokens are not whole sequences.
    """
    batch, length = run.train.batch, run.data.sequence_length
    if run.train.batch_unit == "sequences":
        return batch
    if batch % length:
        below, above = batch // length * length, (batch // length + 1) * length
        fits = f"{below} ({below // length} sequences) or {above}" if below else f"{above}"
        raise UsageError(
            f"a batch of {batch} tokens is not a whole number of sequences of {length}",
            fix=f"the nearest that divide: {fits} ({above // length} sequences)"
            if below
            else f"the nearest that divides: {fits} (1 sequence)",
            key="train.batch",
        )
    return batch // length


def recomputed(run: Run) -> int:
    """How many blocks, the first ones, work something out again in the backward pass."""
    return 0 if run.train.recompute == "none" else run.train.recompute_layers or run.model.num_layers


def check(run: Run) -> None:
    """Refuse values that no run could use.

    Raises:
        UsageError: naming the first such knob, its value and its range.
    """
    for knob in knobs():
        _check_one(knob, value(run, knob.key))
    if not run.data.sources:
        raise UsageError("there is nothing to learn from: data.sources is empty", key="data.sources")
    if not all(run.data.sources):
        raise UsageError("a source is empty", fix="name a file or folder; this folder is ./", key="data.sources")
    if run.data.weights and len(run.data.weights) != len(run.data.sources):
        raise UsageError(
            f"{len(run.data.weights)} weights for {len(run.data.sources)} sources",
            fix="give each source its weight, or none any",
            key="data.weights",
        )
    if any(not 0 < weight < float("inf") for weight in run.data.weights):
        raise UsageError(
            f"data.weights is {list(run.data.weights)}", fix="each must be more than 0", key="data.weights"
        )
    if run.model.head_dim % 2:
        raise UsageError(
            f"head_dim {run.model.head_dim} is odd", fix="rotary positions turn channels in pairs", key="model.head_dim"
        )
    if run.model.num_heads % run.model.num_kv_heads:
        divisors = [n for n in range(1, run.model.num_heads + 1) if run.model.num_heads % n == 0]
        raise UsageError(
            f"cannot share {run.model.num_kv_heads} key/value heads among {run.model.num_heads} query heads",
            fix=f"num_kv_heads can be {', '.join(map(str, divisors))}",
            key="model.num_kv_heads",
        )
    _check_rotary(run)
    _check_steps(run)
    _check_recompute(run)
    batch_sequences(run)


def _check_one(knob: Knob, given: Any) -> None:
    """Refuse a value for what it is, whatever the others are."""
    wanted = ""
    if knob.type is float and not math.isfinite(given):
        wanted = "a finite number"
    elif knob.type is int and given > knob.most:
        wanted = f"at most {knob.most:,}"
    elif knob.key in ("folder", "data.cache", "data.text_field") and not given:
        wanted = "something; leave it out for the default"
    elif knob.within:
        words, fits = {
            "> 0": ("more than 0", given > 0),
            ">= 0": ("0 or more", given >= 0),
            "[0, 1)": ("at least 0 and less than 1", 0 <= given < 1),
            "(0, 1]": ("more than 0 and at most 1", 0 < given <= 1),
            "[0, 1]": ("from 0 to 1", 0 <= given <= 1),
        }[knob.within]
        wanted = "" if fits else words
    if wanted:
        raise UsageError(f"{knob.key} is {given!r}", fix=f"it must be {wanted}", key=knob.key)


def _check_rotary(run: Run) -> None:
    if run.model.rope_theta <= 1:
        raise UsageError(
            f"model.rope_theta is {run.model.rope_theta}", fix="it must be more than 1", key="model.rope_theta"
        )
    if run.model.rope_scaling in ("llama3", "yarn") and not 0 < run.model.rope_low < (run.model.rope_high or 4):
        raise UsageError(
            f"model.rope_low {run.model.rope_low} and model.rope_high {run.model.rope_high} do not fit each other",
            fix="rope_low must be more than 0 and less than rope_high (0: 4 for llama3, 32 for yarn)",
            key="model.rope_low",
        )


def _check_steps(run: Run) -> None:
    if run.train.stop_at > run.train.steps:
        raise UsageError(
            f"train.stop_at is {run.train.stop_at}, and the run has {run.train.steps} steps",
            fix="leave it out",
            key="train.stop_at",
        )
    decay = run.schedule.decay or run.train.steps // 5
    if run.schedule.name == "wsd" and run.schedule.warmup + decay > run.train.steps:
        raise UsageError(
            f"a warmup of {run.schedule.warmup} and a decay of {decay} steps do not fit into {run.train.steps}",
            fix="shorten schedule.warmup or schedule.decay",
            key="schedule.decay",
        )


def _check_recompute(run: Run) -> None:
    blocks, there = run.train.recompute_layers, run.model.num_layers
    if blocks and run.train.recompute == "none":
        raise UsageError(
            f"train.recompute_layers is {blocks}, and train.recompute is none: nothing is recomputed in any block",
            fix="set train.recompute to attention or full, or leave train.recompute_layers out",
            key="train.recompute_layers",
        )
    if blocks > there:
        raise UsageError(
            f"cannot recompute {blocks} blocks: the model has {there}",
            fix=f"set it to {there} or less, or to 0, which takes all of them",
            key="train.recompute_layers",
        )
