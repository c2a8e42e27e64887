"""Gradients of copies sent in fewer bytes: what it costs in loss, what it spares on the wire, and in time on a slow link.

Loss: a small decoder learns the running Python's library for 320 steps on two copies, each way with the same seeds. The
held-out loss after the last step is taken; the deviation is that of the exact runs over their seeds (n - 1 in the
divisor). A way is within the band where the mean of its losses over the seeds is no further than 2 deviations from the
mean of the exact ones, above or below. Three seeds make a rough deviation: the losses themselves are in the rows. For
1-bit the first 100 steps are exact, as it is by default.

Bytes: those a copy sends to the other in a step, counted, of the last step.

Time: a step of a larger model on two hosts joined by a link of 100 mbit/s (tc tbf; needs root), in rounds of exact,
another way, exact.

Goals: bf16 and 1-bit within 2 deviations of the exact runs; half the bytes in bf16, and at most 1/30 as signs; on the
slow link every way takes less time than the exact one.

    python -m benchmarks.compression [--check] [--only loss|link]
"""

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks import hosts, measure
from benchmarks.rank_steps import NARROW, batch_of
from outlast import cli, config, environment, parallel
from outlast.config import Parallel, Run, Train
from outlast.data.batches import MicroBatch
from outlast.parallel import gradients
from outlast.parallel.inputs import inputs
from outlast.parallel.mesh import Mesh, make
from outlast.train import loop, start
from outlast.train.optimizer import Optimizer, clip
from outlast.train.watchers import Watcher

GOALS: Final = (
    "bf16 and onebit: the mean held-out loss of 3 seeds within 2 deviations of that of the exact runs",
    "a copy sends half the bytes in bf16, and at most 1/30 of them as signs",
    "on a link of 100 mbit/s a step takes less time than the exact one, every way",
)
SEEDS: Final = (0, 1, 2)
STEPS: Final = 320
WAYS: Final = {
    "exact": {},
    "bf16": {"dp_compress": "bf16"},
    "onebit": {"dp_compress": "onebit"},
    "topk 1 %": {"dp_compress": "topk", "dp_topk": 0.01},
}
MBIT: Final = 100
SMALL: Final = {
    "model.hidden_size": 64, "model.intermediate_size": 176, "model.num_layers": 2, "model.num_heads": 2,
    "model.num_kv_heads": 2, "model.head_dim": 32, "data.sequence_length": 128, "train.batch": 8, "train.micro_batch": 4,
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
        sent = (
            number
            for name, number in numbers.items()
            if name.startswith("comm.dp_replicate.") and name.endswith(".bytes")
        )
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
            print(
                f"{way}, seed {seed}: held-out {found[way, seed][1]:.4f} ({time.perf_counter() - begun:.0f} s)",
                flush=True,
            )
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
                "of one seed, at most": round(max(abs(one - base) for one, base in zip(after, exact, strict=True)), 5),
                "bytes a step": found[way, SEEDS[0]][2],
                "fewer": round(sent / found[way, SEEDS[0]][2], 2),
            }
        )
    return rows


def link(rounds: int) -> Iterator[dict[str, Any]]:
    """Time steps on two hosts with a slow link between. Yields a row a way.

    Raises:
        RuntimeError: a rank failed; with what it wrote.
    """
    with hosts.hosts(2) as name:
        for host in range(2):
            hosts.shape(name, host, MBIT)
        seen = hosts.told_by_ranks(name, (0, 1), ["benchmarks.compression", "--as-rank", str(rounds)], limit=600)
    for way in list(WAYS)[1:]:
        told = zip(*(one[way]["rounds"] for one in seen), strict=True)
        slowest = [tuple(map(max, zip(*each, strict=True))) for each in told]
        pair, sent = measure.pair(slowest[1:]), seen[0][way]["bytes"]
        yield {
            "way": way,
            "step s": pair.b_seconds,
            "exact s": pair.a_seconds,
            "times as fast": pair.ratio,
            "A/A spread": f"{pair.spread[0]:.3f}-{pair.spread[1]:.3f}",
            "MB sent": sent / 1e6,
            "s on the link, at the least": sent * 8 / MBIT / 1e6,
            "exact MB": seen[0]["exact"]["bytes"] / 1e6,
        }


def as_rank(rounds: int) -> None:
    """Take steps of exact, another way, exact, both copies beginning together, and print their times in seconds."""
    torch.set_num_threads(1)
    mesh = make(Parallel(dp_replicate=2), torch.device("cpu"))
    steps = {way: stepper(knobs, mesh) for way, knobs in WAYS.items()}
    found: dict[str, Any] = {}
    for way, step in steps.items():
        step()  # of 1-bit, the exact one
        mesh.counts.take()
        step()
        sent = sum(one.bytes for (axis, _), one in mesh.counts.take().items() if axis == "dp_replicate")
        found[way] = {"bytes": sent, "rounds": []}
    for way in list(steps)[1:]:
        for _ in range(rounds + 1):
            times = []
            for step in (steps["exact"], steps[way], steps["exact"]):
                mesh.largest(0)
                begun = time.perf_counter()
                step()
                times.append(time.perf_counter() - begun)
            found[way]["rounds"].append(times)
    mesh.leave()
    print(json.dumps(found))


def stepper(knobs: dict[str, Any], mesh: Mesh) -> Callable[[], None]:
    """A step as train/loop.py takes it, of 4 layers of width 256, on 64 tokens a copy: few, so that the link is what it waits for."""
    run = Run(model=NARROW, train=Train(dtype="float32"), parallel=Parallel(dp_replicate=2, dp_exact_steps=1, **knobs))
    model, parts = parallel.build(run, mesh)
    optimizer, taken = Optimizer(parts, run, mesh), [0]
    tokens, targets = (x[mesh.rank : mesh.rank + 1].numpy() for x in batch_of(NARROW, 2, 64))
    one = MicroBatch(torch.arange(1).numpy(), tokens, targets, torch.arange(64)[None].numpy(), ((64,),))
    copies = optimizer.copies
    model.train()

    def step() -> None:
        taken[0] += 1
        (model(*inputs(one, mesh)) / 128).backward()
        gradients.complete(parts, mesh, copies.sums(taken[0]))
        clip(parts, mesh, 1.0, apart=copies.apart(taken[0]))
        optimizer.step(1e-4, taken[0])

    return step


def main() -> None:
    """Measure, print and write; with --check exit 1 where a goal is missed, the figure on the last line."""
    parser = argparse.ArgumentParser(description="gradients of copies sent in fewer bytes")
    parser.add_argument("--check", action="store_true", help="exit 1 where a goal is missed")
    parser.add_argument("--only", choices=["loss", "link"], help="one half; nothing is written then")
    parser.add_argument("--rounds", type=int, default=9, help="of steps on the link (default: 9)")
    parser.add_argument("--as-rank", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        return as_rank(options.as_rank)
    if why := hosts.reason_not_to() if options.only != "loss" else "":
        parser.error(why)
    timed = list(link(options.rounds)) if options.only != "loss" else []
    rows: list[dict[str, Any]] = []
    if options.only != "link":
        with measure.worker_groups() as groups, tempfile.TemporaryDirectory() as folder:
            rows = losses(groups, Path(folder))
        measure.show(f"held-out loss after {STEPS} steps on two copies, and what one sends the other in a step", rows)
    if timed:
        measure.show(f"a step on two hosts, {MBIT} mbit/s between them", timed)
    missed = [
        f"{row['way']} is off by {row['off by, in deviations of exact']} deviations"
        for row in rows
        if row["way"] in ("bf16", "onebit") and abs(row["off by, in deviations of exact"]) > 2
    ]
    least = {"bf16": 2, "onebit": 30}
    missed += [
        f"{row['way']} sends {row['fewer']} times fewer bytes"
        for row in rows
        if row["fewer"] < least.get(row["way"], 0)
    ]
    missed += [
        f"a step by {row['way']} is {row['times as fast']:.2f} times as fast"
        for row in timed
        if row["times as fast"] <= 1
    ]
    if not options.only:
        beside = {row["way"]: {f"link: {key}": told for key, told in row.items() if key != "way"} for row in timed}
        nothing = {key: None for key in next(iter(beside.values()))}
        whole = [row | beside.get(row["way"], nothing) for row in rows]
        measure.save("compression", GOALS, whole, ranks=2)
    told = rows or timed
    print("; ".join(missed) or f"all met; {told[-1]}")
    sys.exit(bool(options.check and missed))


if __name__ == "__main__":
    main()
