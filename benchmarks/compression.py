"""Gradients of copies sent in fewer bytes: what it costs in loss, what it spares on the wire, and in time on a slow link.

Loss: a small decoder learns the running Python's library for 320 steps on two copies, each way with the same seeds. The
held-out loss after the last step is taken; the deviation is that of the exact runs over their seeds (n - 1 in the
divisor). A way is within the band where the mean of its losses over the seeds is no further than 2 deviations from the
mean of the exact ones, above or below. Three seeds make a rough deviation: the losses themselves are in the rows. For
1-bit the first 100 steps are exact, as it is by default.

Bytes: those a copy sends to the other in a step, counted, of the last step.

Time: a step of a larger model on two hosts joined by a link of 100 mbit/s (tc tbf; needs root), in rounds of exact,
another way, exact.

Goals: bf16 and 1-bit within 2 deviations of the exact runs; half the bytes in bf16, and under 1/24 as signs; on the
slow link every way takes less time than the exact one.

    python -m benchmarks.compression [--check] [--only loss|link]
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks import hosts, measure
from outlast import cli, config, environment
from outlast.train import loop, start
from outlast.train.watchers import Watcher

SEEDS: Final = (0, 1, 2)
STEPS: Final = 320
WAYS: Final = {
    "exact": {},
    "bf16": {"dp_compress": "bf16"},
    "onebit": {"dp_compress": "onebit"},
    "topk 1 %": {"dp_compress": "topk", "dp_topk": 0.01},
}
SMALL: Final = {
    "model.hidden_size": 96, "model.intermediate_size": 256, "model.num_layers": 2, "model.num_heads": 3,
    "model.num_kv_heads": 3, "model.head_dim": 32, "data.sequence_length": 128, "train.batch": 8, "train.micro_batch": 4,
    "train.steps": STEPS, "optim.lr": 3e-3, "schedule.warmup": 40, "eval.samples": 256, "eval.every": 0,
}  # fmt: skip


class Last(Watcher):
    """Watcher: keeps the held-out losses, and what the last step sent to the other copy."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.bytes = 0

    def evaluation(self, step: int, loss: float) -> None:
        """Keep it."""
        self.losses.append(loss)

    def update(self, step: int, numbers: dict[str, float | None]) -> None:
        """Add up what went over dp_replicate."""
        sent = (number for name, number in numbers.items() if name.startswith("comm.dp_replicate.") and name.endswith(".bytes"))
        self.bytes = sum(int(number or 0) for number in sent)


def words_of(knobs: dict[str, Any]) -> list[str]:
    """The arguments of `outlast train` for two copies."""
    every = {
        "data.tokenizer": "bytes", "train.dtype": "float32", "train.threads": 1, "train.device": "cpu",
        "parallel.dp_replicate": 2, "checkpoint.every": 1 << 30, "checkpoint.keep": 1,
    } | knobs  # fmt: skip
    return [f"--{key.replace('_', '-')}={value}" for key, value in every.items()]


def trained(words: Sequence[str]) -> tuple[float, float, int]:
    """Train as a rank of a worker group: held-out loss before and after, and bytes to the other copy in the last step."""
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    command, _ = cli.read_run(cli.TrainCommand, list(words), "train")
    run = config.Run(**{field.name: getattr(command, field.name) for field in dataclasses.fields(config.Run)})
    launched = environment.Launched(rank, ranks, rank, ranks)
    training, last = start.open_run(start.settle(run, launched=launched), launched), Last()
    loop.train(training, [last])
    training.close("done", 0)
    training.mesh.leave()
    return last.losses[0], last.losses[-1], last.bytes


def losses(groups: Any, folder: Path) -> list[dict[str, Any]]:
    """Train every way with every seed. A row a way."""
    found = {}
    for way, knobs in WAYS.items():
        for seed in SEEDS:
            told = {f"parallel.{key}": value for key, value in knobs.items()} | SMALL
            told |= {"train.seed": seed, "folder": folder / f"{way[:4]}-{seed}", "data.cache": folder / "cache"}
            begun = time.perf_counter()
            found[way, seed] = groups.run(2, trained, words_of(told), limit=600)[0]
            print(f"{way}, seed {seed}: held-out {found[way, seed][1]:.4f} ({time.perf_counter() - begun:.0f} s)", flush=True)
    exact = [found["exact", seed][1] for seed in SEEDS]
    mean, deviation, sent = statistics.mean(exact), statistics.stdev(exact), found["exact", SEEDS[0]][2]
    rows = []
    for way in WAYS:
        after = [found[way, seed][1] for seed in SEEDS]
        off = (statistics.mean(after) - mean) / deviation
        rows.append(
            {
                "way": way,
                "held-out loss, mean of 3 seeds": round(statistics.mean(after), 5),
                "of each": ", ".join(f"{one:.4f}" for one in after),
                "deviation": round(statistics.stdev(after), 5),
                "off by, in deviations of exact": round(off, 2),
                "bytes a step": found[way, SEEDS[0]][2],
                "fewer": round(sent / found[way, SEEDS[0]][2], 2),
            }
        )
    return rows


if __name__ == "__main__":
    with measure.worker_groups() as groups, tempfile.TemporaryDirectory() as folder:
        measure.show("loss", losses(groups, Path(folder)))
