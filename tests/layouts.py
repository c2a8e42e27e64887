"""Training under a layout with everything kept that there is to compare, put together from the ranks' parts.

Shared by the tests and by benchmarks/layouts_equal.py. The reference is one process.
"""

import dataclasses
import json
import math
import random
from dataclasses import dataclass, field
from pathlib import Path

import torch

from outlast import cli, config
from outlast.environment import Launched
from outlast.layout import AXES
from outlast.parallel import gradients
from outlast.train import loop, start
from outlast.train.watchers import Record, Watcher

SHAPE = {
    "model.hidden_size": 16, "model.intermediate_size": 24, "model.num_layers": 2, "model.num_heads": 4,
    "model.num_kv_heads": 2, "model.head_dim": 4, "model.qk_norm": True, "model.qkv_bias": True, "model.out_bias": True,
    "model.mlp_bias": True, "model.dropout": 0.1,
}  # fmt: skip
"""Everything a layout could get wrong is in it: norms of queries and keys, biases, dropout, grouped heads."""

LAYOUTS = {
    "dp_replicate 2": {"dp_replicate": 2},
    "dp_shard 2": {"dp_shard": 2},
    "dp_shard 4": {"dp_shard": 4},
    "dp_replicate 2 x dp_shard 2": {"dp_replicate": 2, "dp_shard": 2},
    "dp_replicate 3": {"dp_replicate": 3},
    "dp_shard 3": {"dp_shard": 3},
    "tp 2": {"tp": 2},
    "tp 2 + sp": {"tp": 2, "sp": True},
    "tp 2 + sp, regather": {"tp": 2, "sp": True, "sp_regather": True},
    "tp 2 + sp, overlap": {"tp": 2, "sp": True, "overlap": 4},
    "tp 2 + sp, regather, overlap": {"tp": 2, "sp": True, "sp_regather": True, "overlap": 8},
    "tp 4 + sp, overlap": {"tp": 4, "sp": True, "overlap": 16},
    "tp 4": {"tp": 4},
    "tp 4 + sp": {"tp": 4, "sp": True},
    "tp 2 x dp_shard 2": {"tp": 2, "dp_shard": 2},
    "tp 2 + sp x dp_shard 2": {"tp": 2, "sp": True, "dp_shard": 2},
    "tp 2 + sp, regather x dp_shard 2": {"tp": 2, "sp": True, "sp_regather": True, "dp_shard": 2},
    "tp 2 + sp, overlap x dp_shard 2": {"tp": 2, "sp": True, "overlap": 4, "dp_shard": 2},
    "tp 2 + sp, regather x dp_shard 3": {"tp": 2, "sp": True, "sp_regather": True, "dp_shard": 3},
    "tp 2 + sp x dp_replicate 2": {"tp": 2, "sp": True, "dp_replicate": 2},
    "ulysses 2": {"ulysses": 2},
    "ulysses 4": {"ulysses": 4},
    "ring 2": {"ring": 2},
    "ring 4": {"ring": 4},
    "ring 2 x ulysses 2": {"ring": 2, "ulysses": 2},
    "ring 2 x tp 2": {"ring": 2, "tp": 2},
    "ring 2 x tp 2 + sp": {"ring": 2, "tp": 2, "sp": True},
    "ulysses 2 x tp 2": {"ulysses": 2, "tp": 2},
    "ulysses 2 x tp 2 + sp": {"ulysses": 2, "tp": 2, "sp": True},
    "ring 2 x dp_shard 2": {"ring": 2, "dp_shard": 2},
    "ulysses 2 x dp_shard 2": {"ulysses": 2, "dp_shard": 2},
    "ring 2, sharing weights": {"ring": 2, "shard_sequence_ranks": True},
    "ring 2 x ulysses 2, sharing weights": {"ring": 2, "ulysses": 2, "shard_sequence_ranks": True},
    "ring 2 x dp_shard 2, sharing weights": {"ring": 2, "dp_shard": 2, "shard_sequence_ranks": True},
    "ulysses 2 x dp_replicate 2": {"ulysses": 2, "dp_replicate": 2},
    "ring 2 x ulysses 2 x tp 2 + sp": {"ring": 2, "ulysses": 2, "tp": 2, "sp": True},
    "ring 2 x tp 2 + sp x dp_shard 2": {"ring": 2, "tp": 2, "sp": True, "dp_shard": 2},
    "ring 2 x ulysses 2 x dp_shard 2, sharing weights": {"ring": 2, "ulysses": 2, "dp_shard": 2, "shard_sequence_ranks": True},
    "tp 2 + sp x dp_shard 2 x dp_replicate 2": {"tp": 2, "sp": True, "dp_shard": 2, "dp_replicate": 2},
}  # fmt: skip


def ranks_of(layout: dict[str, int | bool]) -> int:
    """How many ranks a layout is for."""
    return math.prod(layout.get(axis, 1) for axis in AXES)


def corpus(folder: Path, records: int = 120, seed: int = 0) -> Path:
    """Prompts and answers of many lengths: only answers are learned, so masks are uneven over samples and ranks."""
    path = folder / "answers.jsonl"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        draw = random.Random(seed)
        words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta"]
        told = (
            {k: " ".join(draw.choices(words, k=draw.randint(1, 6))) for k in ("prompt", "completion")}
            for _ in range(records)
        )
        path.write_text("".join(json.dumps(one) + "\n" for one in told))
    return path


def words(folder: Path, layout: dict[str, int | bool], name: str, **more: object) -> list[str]:
    """The arguments of `outlast train` for five steps under a layout; knobs with __ for the dot."""
    knobs = SHAPE | {f"parallel.{key}": value for key, value in layout.items()}
    knobs |= {
        "data.sources": corpus(folder / "corpus"), "data.cache": folder / "cache", "data.sequence_length": 16, "data.held_out": 0.05,
        "train.steps": 5, "train.batch": 8, "train.micro_batch": 2, "train.dtype": "float64", "train.threads": 1, "schedule.warmup": 2,
        "optim.lr": 0.01, "optim.clip": 0.05, "eval.samples": 7, "folder": folder / name,
    }  # fmt: skip
    knobs |= {key.replace("__", "."): value for key, value in more.items()}
    told = []
    for key, value in knobs.items():
        flag = key.replace("_", "-")
        if isinstance(value, bool):
            told.append(f"--{flag}" if value else f"--{flag.replace('.', '.no-', 1)}")
        else:
            told += [f"--{flag}", str(value)]
    return told


@dataclass
class Kept:
    """What one rank, or one process, came to.

    Attributes:
        loss, norm, largest: a number a step: the loss, the gradients' 2-norm and largest element before clipping.
        tensors: `gradient.STEP.NAME`, and at the end what a checkpoint holds; with its place in the whole.
        counted: what was sent in the last step, by (axis, operation): calls and bytes.
        held_out: loss of the evaluations.
    """

    loss: list[float] = field(default_factory=list)
    norm: list[float] = field(default_factory=list)
    largest: list[float] = field(default_factory=list)
    tensors: dict = field(default_factory=dict)
    counted: dict = field(default_factory=dict)
    held_out: list[float] = field(default_factory=list)


class Keep(Watcher):
    """Watcher: keeps what a step came to. Gradients are kept as clipped."""

    def __init__(self, training: start.Training) -> None:
        self.training, self.kept = training, Kept()
        clip = loop.clip

        def looked(parts, mesh, largest, **more):
            self.kept.largest.append(gradients.norm(parts, mesh, math.inf))
            return clip(parts, mesh, largest, **more)

        self.looked = looked

    def gradients(self, step: int, loss: float, norm: float) -> None:
        self.kept.loss.append(loss)
        self.kept.norm.append(norm)
        for part in self.training.parts:
            grad = part.parameter.grad
            self.kept.tensors[f"gradient.{step}.{part.name}"] = (grad.clone(), part.place)

    def update(self, step: int, numbers: dict) -> None:
        self.kept.counted = {name: number for name, number in numbers.items() if name.startswith("comm.")}

    def evaluation(self, step: int, loss: float) -> None:
        self.kept.held_out.append(loss)


def trained(arguments: list[str], optimizer: str = "", rank: int = 0, ranks: int = 1) -> Kept:
    """Train as one rank of a started process group, or alone.

    Args:
        arguments: of `outlast train`.
        optimizer: `sgd` for plain gradient descent in place of the run's own: Adam hides wrong scales.
    """
    command, _ = cli.read_run(cli.TrainCommand, arguments, "train")
    run = config.Run(**{f.name: getattr(command, f.name) for f in dataclasses.fields(config.Run)})
    launched = Launched(rank, ranks, rank, ranks) if ranks > 1 else None
    training = start.open_run(start.settle(run, launched=launched), launched)
    if optimizer == "sgd":
        training.optimizer.optimizers = [torch.optim.SGD([part.parameter for part in training.parts])]
    keep = Keep(training)
    before, loop.clip = loop.clip, keep.looked
    try:
        loop.train(training, [Record(training), keep])
    finally:
        loop.clip = before
        training.close("done", 0)
    for name, shard in start.tensors(training.parts, training.optimizer).items():
        keep.kept.tensors[name] = (shard.tensor.clone(), shard.place)
    training.mesh.leave()
    return keep.kept


def on_rank(arguments: list[str], optimizer: str = "") -> Kept:
    """:func:`trained`, run by a worker group."""
    import torch.distributed as dist

    return trained(arguments, optimizer, dist.get_rank(), dist.get_world_size())


def put_together(kept: list[Kept]) -> Kept:
    """The whole tensors from all ranks' parts; what several have must be the same bits."""
    wholes: dict[str, torch.Tensor] = {}
    for one in kept:
        for name, (part, place) in one.tensors.items():
            whole = wholes.setdefault(name, torch.full(place.whole, math.nan, dtype=part.dtype))
            here = whole[place.slices]
            known = ~here.isnan()
            if not torch.equal(here[known], part[known]):
                raise AssertionError(f"{name}: two ranks hold other values of the same elements")
            whole[place.slices] = part
    for name, whole in wholes.items():
        if whole.isnan().any():
            raise AssertionError(f"{name}: nobody holds some of its elements")
    for what in ("loss", "norm", "largest", "held_out"):
        if any(getattr(one, what) != getattr(kept[0], what) for one in kept):
            raise AssertionError(f"the ranks do not agree on {what}")
    return dataclasses.replace(kept[0], tensors=wholes)


def furthest(one: Kept, other: Kept) -> dict[str, float]:
    """The largest relative difference, by kind: of the numbers, and of ‖a − b‖/‖b‖ over the tensors."""
    if one.tensors.keys() != other.tensors.keys():
        raise AssertionError(f"not the same tensors: {one.tensors.keys() ^ other.tensors.keys()}")
    found = {"gradient": 0.0, "model": 0.0, "optim": 0.0}
    for name, ours in one.tensors.items():
        theirs = other.tensors[name]
        difference = (
            ((ours - theirs).norm() / theirs.norm().clamp(min=1e-300)).item() if theirs.norm() else ours.norm().item()
        )
        found[name.split(".")[0]] = max(found[name.split(".")[0]], difference)
    for what in ("loss", "norm", "largest", "held_out"):
        pairs = zip(getattr(one, what), getattr(other, what), strict=True)
        found[what] = max((abs(a - b) / (abs(b) or 1.0) for a, b in pairs), default=0.0)
    return found
