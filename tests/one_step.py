"""A model spread over ranks and taken through one step by hand: made-up tokens, no corpus, no folder, no loop.

What comes back has the form of tests/layouts.py, so that it is put together and compared as whole runs are. Every weight
is moved away from its initial value: norms are not 1 and biases not 0.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from layouts import Kept
from ranks import once

from outlast.config import Model, Optim, Parallel, Run, Train
from outlast.data import IGNORED
from outlast.data.batches import MicroBatch
from outlast.model.randomness import fill_normal
from outlast.model.transformer import Transformer
from outlast.parallel import build
from outlast.parallel.gradients import Part, complete, norm
from outlast.parallel.inputs import inputs
from outlast.parallel.mesh import Mesh, make
from outlast.train.optimizer import clip

SHAPE = Model(
    vocab_size=33, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4,
    qk_norm=True, qkv_bias=True, out_bias=True, mlp_bias=True,
)  # fmt: skip
CPU = torch.device("cpu")
RATE = 0.5
"""Of the plain gradient step."""


def run_of(layout: dict[str, Any], optimizer: str = "adamw", seed: int = 0, **shape: Any) -> Run:
    """A run of SHAPE, some of it otherwise, in float64."""
    model, train = replace(SHAPE, **shape), Train(dtype="float64", seed=seed)
    return Run(model=model, optim=Optim(name=optimizer), train=train, parallel=Parallel(**layout))


def batch(learned: Sequence[Sequence[int]], length: int = 8, first: int = 0, cuts: Sequence[int] = ()) -> MicroBatch:
    """Sequences of made-up tokens.

    Args:
        learned: for each sequence, the places whose target is learned.
        length: of each.
        first: position of the first one's sample.
        cuts: where documents begin, in each of them.
    """
    positions = np.arange(first, first + len(learned))
    draws = [np.random.default_rng(int(position)).integers(0, SHAPE.vocab_size, length + 1) for position in positions]
    drawn = np.array(draws, dtype=np.int64).reshape(-1, length + 1)
    targets = np.full((len(learned), length), IGNORED, dtype=np.int64)
    for row, places in enumerate(learned):
        targets[row, list(places)] = drawn[row, 1:][list(places)]
    lengths = tuple(int(n) for n in np.diff([0, *cuts, length]))
    where = np.tile(np.concatenate([np.arange(n) for n in lengths]), (len(learned), 1))
    return MicroBatch(positions, drawn[:, :-1], targets, where, (lengths,) * len(learned))


def spread(run: Run) -> tuple[Mesh, Transformer, list[Part]]:
    """This rank's part of a run's model, its weights moved by as much wherever they are kept."""
    mesh = once(make, run.parallel, CPU)
    model, parts = build(run, mesh)
    with torch.no_grad():
        for part in parts:
            move = torch.empty_like(part.parameter)
            fill_normal(move, 0.2, 5, part.name, part.place)
            part.parameter.add_(move)
    return mesh, model, parts


def gradients(
    run: Run,
    mesh: Mesh,
    model: Transformer,
    parts: list[Part],
    work: list[list[MicroBatch]],
    over_copies: Callable | None = None,
) -> float:
    """Make the gradients of a step; returns its loss, the mean over all that is learned.

    Args:
        work: for each data rank its micro-batches, as many for one as for another.
        over_copies: what sums over `dp_replicate`, where an all-reduce does not.
    """
    if len(work) != mesh.data_ranks:
        raise AssertionError(f"work for {len(work)} data ranks, and there are {mesh.data_ranks}")
    for part in parts:
        part.parameter.grad = None
    learned = max(1, sum(one.learned for batches in work for one in batches))
    total = torch.zeros((), dtype=torch.float64)
    model.train()
    for one in work[mesh.data_rank]:
        loss = model(*inputs(one, mesh))
        (loss / learned).backward()
        total += loss.detach()
    complete(parts, mesh, over_copies)
    return mesh.sum(total, alike=("tp",)).item() / learned


def taken(
    run: Run, mesh: Mesh, model: Transformer, parts: list[Part], work: list[list[MicroBatch]], largest: float = 0.0
) -> Kept:
    """A step of plain gradient descent: loss, both norms, gradients as clipped to `largest`, and the weights after."""
    kept = Kept(loss=[gradients(run, mesh, model, parts, work)], largest=[norm(parts, mesh, math.inf)])
    kept.norm = [clip(parts, mesh, largest)]
    for part in parts:
        gradient = part.parameter.grad
        kept.tensors[f"gradient.{part.name}"] = (gradient.clone(), part.place)
        kept.tensors[f"model.{part.name}"] = (part.parameter.detach() - RATE * gradient, part.place)
    return kept


def on_rank(run: Run, work: list[list[MicroBatch]], largest: float = 0.0) -> Kept:
    """:func:`taken` with a model of its own: for a worker group, or alone."""
    return taken(run, *spread(run), work, largest)


def masks(run: Run, work: list[list[MicroBatch]]) -> list[torch.Tensor]:
    """What dropout does to ones at every site, in the order it is met in a pass over this rank's first micro-batch."""
    mesh, model, _ = spread(run)
    seen: list[torch.Tensor] = []

    def looked_at(dropout: Callable) -> Callable:
        def dropped(x: torch.Tensor, packing: Any, training: bool) -> torch.Tensor:
            seen.append(dropout(torch.ones_like(x), packing, training))
            return dropout(x, packing, training)

        return dropped

    model.drop_embedding = looked_at(model.drop_embedding)
    for block in model.layers:
        block.drop_attention, block.drop_mlp = looked_at(block.drop_attention), looked_at(block.drop_mlp)
    model.train()
    model(*inputs(work[mesh.data_rank][0], mesh)).backward()
    return [mask.detach() for mask in seen]
