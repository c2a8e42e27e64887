"""How ranks share a run: the grid they stand on, who takes which samples, and what divides what. No torch.

The grid is numbered so that the axis that talks most varies fastest: neighbours in `tp` are neighbouring ranks.
"""

import math
from typing import Final

from outlast.config import Model, Parallel
from outlast.errors import UsageError

AXES: Final = ("dp_replicate", "dp_shard", "tp")
"""Axes of the rank grid, slowest first."""


def degrees(parallel: Parallel) -> dict[str, int]:
    """Size of each axis, in the grid's order."""
    return {axis: getattr(parallel, axis) for axis in AXES}


def coordinates(parallel: Parallel, rank: int) -> dict[str, int]:
    """Where a rank stands on each axis."""
    where = {}
    for axis, size in reversed(degrees(parallel).items()):
        rank, where[axis] = divmod(rank, size)
    return where


def check(parallel: Parallel, model: Model, ranks: int) -> None:
    """Refuse a layout that does not fit the model or the ranks there are.

    Raises:
        UsageError: naming the degree and the ones that fit.
    """
    for heads, what in ((model.num_heads, "attention heads"), (model.num_kv_heads, "key/value heads")):
        if heads % parallel.tp:
            fits = [str(n) for n in range(1, heads + 1) if heads % n == 0]
            raise UsageError(
                f"cannot split {heads} {what} over tp={parallel.tp}",
                fix=f"heads per rank must be whole: tp can be {', '.join(fits)}",
                key="parallel.tp",
            )
    wanted = degrees(parallel)
    if math.prod(wanted.values()) != ranks:
        product = " x ".join(f"{axis}={size}" for axis, size in wanted.items())
        raise UsageError(
            f"the layout {product} is for {math.prod(wanted.values())} ranks, and this run has {ranks}",
            fix="this version trains on one rank: leave the degrees at 1"
            if ranks == 1
            else "the degrees' product must be the ranks",
            key=next(f"parallel.{axis}" for axis, size in reversed(wanted.items()) if size > 1 or axis == AXES[0]),
        )


def share(first: int, stop: int, ranks: int, rank: int) -> range:
    """The stretch of positions [first, stop) that one data rank takes: contiguous, sizes at most one apart.

    Every position goes to exactly one rank; with more ranks than positions some get none.
    """
    each, more = divmod(stop - first, ranks)
    begin = first + rank * each + min(rank, more)
    return range(begin, begin + each + (rank < more))


def passes(batch: int, micro_batch: int, ranks: int) -> int:
    """How many forward passes make a step: as many as the rank with the largest share needs."""
    return -(-len(share(0, batch, ranks, 0)) // micro_batch)
