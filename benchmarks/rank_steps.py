"""Steps of several ranks, ours against torch's own: the half of step_time.py that runs inside worker groups."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
import torch.distributed as dist

from benchmarks import measure, torch_peers
from outlast import parallel
from outlast.config import Model, Parallel, Run
from outlast.data.batches import MicroBatch
from outlast.model.transformer import Transformer
from outlast.parallel import gradients
from outlast.parallel import mesh as grid
from outlast.parallel.inputs import inputs
from outlast.train.optimizer import Optimizer, clip

GOALS: Final = ("over ranks: median ratio ours / torch's at most 1.0, or inside the spread of ours against itself",)
NARROW: Final = replace(Model(), vocab_size=4096, num_kv_heads=4, tie_embeddings=False)
WIDE: Final = replace(
    Model(), vocab_size=32000, hidden_size=512, intermediate_size=1408, num_layers=8, num_heads=8, num_kv_heads=4,
    tie_embeddings=False,
)  # fmt: skip
CASES: Final = {
    "TP+SP, 4 layers x 256, 4 x 512 tokens, 2 ranks": (NARROW, Parallel(tp=2, sp=True), 4, 512),
    "TP+SP, 4 layers x 256, 4 x 512 tokens, 4 ranks": (NARROW, Parallel(tp=4, sp=True), 4, 512),
    "TP+SP, 8 layers x 512, 1 x 512 tokens, 2 ranks": (WIDE, Parallel(tp=2, sp=True), 1, 512),
    "TP+SP, 8 layers x 512, 1 x 512 tokens, 4 ranks": (WIDE, Parallel(tp=4, sp=True), 1, 512),
    "FSDP, 4 layers x 256, 4 x 512 tokens, 2 ranks": (NARROW, Parallel(dp_shard=2), 4, 512),
    "FSDP, 4 layers x 256, 4 x 512 tokens, 4 ranks": (NARROW, Parallel(dp_shard=4), 4, 512),
    "FSDP, 8 layers x 512, 2 x 256 tokens, 2 ranks": (WIDE, Parallel(dp_shard=2), 2, 256),
    "FSDP, 8 layers x 512, 4 x 128 tokens, 4 ranks": (WIDE, Parallel(dp_shard=4), 4, 128),
}
"""Shape, layout, and a step's sequences and their length. The vocabularies are 4,096 and 32,000."""


def batch_of(shape: Model, batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets, the same on every rank."""
    tokens = torch.randint(0, shape.vocab_size, (batch, length + 1), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def ours(run: Run, batch: int, length: int) -> tuple[Callable[[], float], grid.Mesh]:
    """Our step as train/loop.py takes it. Calling it returns the mean loss."""
    mesh = grid.make(run.parallel, torch_peers.CPU)
    model, parts = parallel.build(run, mesh)
    optimizer = Optimizer(parts, run, mesh)
    each = batch // mesh.data_ranks
    mine = slice(mesh.data_rank * each, (mesh.data_rank + 1) * each)
    tokens, targets = (x[mine] for x in batch_of(run.model, batch, length))
    places = torch.arange(length).repeat(each, 1)
    arrays = (x.numpy() for x in (torch.arange(batch)[mine], tokens, targets, places))
    one = MicroBatch(*arrays, ((length,),) * each)
    model.train()

    def step() -> float:
        loss = model(*inputs(one, mesh))
        (loss / (batch * length)).backward()
        gradients.complete(parts, mesh)
        clip(parts, mesh, 1.0)
        optimizer.step(torch_peers.LR)
        return mesh.sum(loss.detach().double(), alike=("tp",)).item() / (batch * length)

    return step, mesh


def theirs(run: Run, batch: int, length: int) -> Callable[[], float]:
    """The same step by torch, from the same weights."""
    tokens, targets = batch_of(run.model, batch, length)
    if run.parallel.tp > 1:
        weights = Transformer.on(torch_peers.CPU, run.model, torch.float32, 0).state_dict()
        return torch_peers.tensor_parallel(run.model, weights, tokens, targets)
    n, rank = dist.get_world_size(), dist.get_rank()
    return torch_peers.sharded(run.model, tokens.chunk(n)[rank], targets.chunk(n)[rank])


def in_turn(a: Callable[[], float], b: Callable[[], float], rounds: int) -> list[tuple[float, float, float]]:
    """Seconds of a, b, a in rounds, each begun by all ranks together; one round more than asked for, not to be counted."""
    taken = []
    for _ in range(rounds + 1):
        times = []
        for step in (a, b, a):
            dist.barrier()
            begun = time.perf_counter()
            step()
            times.append(time.perf_counter() - begun)
        taken.append((times[0], times[1], times[2]))
    return taken


def of_slowest(ranks: Sequence[Sequence[tuple[float, float, float]]]) -> measure.Pair:
    """What the rounds of all ranks come to: each step takes as long as on its slowest rank."""
    rounds = [tuple(map(max, zip(*each, strict=True))) for each in zip(*ranks, strict=True)]
    return measure.pair(rounds[1:])


def on_rank(shape: Model, layout: Parallel, batch: int, length: int, rounds: int) -> dict[str, Any]:
    """Take both steps in rounds of ours, theirs, ours, all ranks beginning together.

    Returns:
        `losses` of the first three steps of both; `rounds` of three times in seconds; and `comm`, seconds that one step
        of ours waits for transfers, by axis and operation.
    """
    run = Run(model=shape, parallel=layout)
    run = replace(run, train=replace(run.train, dtype="float32", seed=0))
    (a, mesh), b = ours(run, batch, length), theirs(run, batch, length)
    losses = [(a(), b()) for _ in range(3)]
    mesh.counts.take()
    taken = in_turn(a, b, rounds)
    steps = 2 * (rounds + 1)
    waited = {f"{axis} {op}": tally.seconds / steps for (axis, op), tally in mesh.counts.take().items()}
    return {"losses": losses, "rounds": taken, "comm": waited}


def rows(groups: Any, rounds: int, only: str = "") -> Iterator[dict[str, Any]]:
    """Measure every case. Yields a row of each.

    Raises:
        SystemExit: the two do not compute the same.
    """
    for name, (shape, layout, batch, length) in CASES.items():
        if only not in name:
            continue
        ranks = layout.tp * layout.dp_shard
        told = groups.run(ranks, on_rank, shape, layout, batch, length, rounds, limit=600)
        if any(abs(a - b) > 1e-4 for a, b in told[0]["losses"]):
            sys.exit(f"the two do not compute the same: {name}: {told[0]['losses']}")
        pair = of_slowest([one["rounds"] for one in told])
        waits = {op: sum(one["comm"][op] for one in told) / ranks for op in told[0]["comm"]}
        costs = sorted(waits.items(), key=lambda cost: -cost[1])[:3]
        yield {
            "step": name,
            "ours s": pair.a_seconds,
            "torch s": pair.b_seconds,
            "ratio": pair.ratio,
            "A/A spread": f"{pair.spread[0]:.3f}-{pair.spread[1]:.3f}",
            "transfers / ours": sum(waits.values()) / pair.a_seconds,
            "longest waits": ", ".join(f"{op} {100 * seconds / pair.a_seconds:.0f} %" for op, seconds in costs),
            "met": pair.meets(1.0),
        }
