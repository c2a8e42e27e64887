"""Small runs for tests: a corpus that is made, a model that trains in milliseconds, and what came of it."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import torch

from outlast import cli
from outlast.checkpoint import shards, store

SHAPE = [
    "--model.hidden-size", "16", "--model.intermediate-size", "24", "--model.num-layers", "2", "--model.num-heads", "2",
    "--model.num-kv-heads", "1", "--model.head-dim", "8",
]  # fmt: skip


def corpus(folder: Path, documents: int = 60, seed: int = 0) -> Path:
    """A folder of short texts of many lengths."""
    if folder.exists():
        return folder
    folder.mkdir(parents=True)
    draw = random.Random(seed)
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta"]
    for i in range(documents):
        (folder / f"{i:03d}.txt").write_text(" ".join(draw.choices(words, k=draw.randint(1, 40))) + "\n")
    return folder


def arguments(tmp_path: Path, *more: str, name: str = "run", shape: Sequence[str] = SHAPE) -> list[str]:
    """The words of `outlast train` for a tiny run in tmp_path / name; what comes later overrides."""
    return [
        "train", "--folder", str(tmp_path / name), "--data.sources", str(corpus(tmp_path / "corpus")),
        "--data.cache", str(tmp_path / "cache"), "--data.sequence-length", "32", "--data.held-out", "0.1", *shape,
        "--train.steps", "10", "--train.batch", "4", "--schedule.warmup", "2", "--optim.lr", "0.01",
        "--train.threads", "1", "--eval.samples", "4", *more,
    ]  # fmt: skip


def train(tmp_path: Path, *more: str, name: str = "run") -> int:
    """Run it in this process. Returns the exit code."""
    return cli.main(arguments(tmp_path, *more, name=name))


def journal(folder: Path) -> list[dict]:
    """The journal's lines."""
    return [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the newest checkpoint."""
    saved = store.Store(folder / "checkpoints", 1).newest()
    kinds = {name: torch.zeros(shape) for name, shape in store.contents(saved).items()}
    from torch.distributed.checkpoint import FileSystemReader

    entries = FileSystemReader(saved.path).read_metadata().state_dict_metadata
    tensors = {name: zero.to(entries[name].properties.dtype) for name, zero in kinds.items()}
    store.Store(folder / "checkpoints", 1).load(saved, shards.whole(tensors))
    return tensors


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(one[n].numpy().tobytes() == other[n].numpy().tobytes() for n in one)
