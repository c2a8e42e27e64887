"""A micro-batch as the ranks of one copy take it: which tokens of each sequence are whose, and in which order.

The ranks of `ring` share a sequence as :mod:`outlast.parallel.zigzag` says; of what one of them has, each rank of
`ulysses` takes a stretch, both in the order of the tokens' places. Rotary positions and targets go with their tokens.

Under sequence parallelism rank i of t has the residual stream at the i-th stretch of R tokens of each sequence's here.
What is gathered from all of them stands in *rank order*: t·B rows of R tokens, row i·B + b being rank i's stretch of
sequence b. Tokens, targets and positions come in that order, and nothing has to be copied to bring it about.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Int64, Shaped
from torch import Tensor

from outlast import layout
from outlast.data import IGNORED
from outlast.data.batches import MicroBatch
from outlast.model.transformer import Packing
from outlast.parallel import zigzag
from outlast.parallel.mesh import Mesh


def inputs(one: MicroBatch, mesh: Mesh) -> tuple[Tensor, Tensor, Packing]:
    """What the model takes on this rank: tokens, targets, and where they stand."""
    here = places(one.documents, one.tokens_BS.shape[1], mesh)
    arrays = (*(_at(x, here) for x in (one.tokens_BS, one.targets_BS, one.places_BS)), one.positions_B, here)
    tokens, targets, positions, samples, stream = (
        torch.from_numpy(array).to(mesh.device, non_blocking=True) for array in arrays
    )
    if mesh.parallel.sp and "tp" in mesh.axes:
        axis = mesh.axes["tp"]
        tokens, targets, positions = (in_rank_order(x, axis.size) for x in (tokens, targets, positions))
        stream = stream.unflatten(1, (axis.size, -1))[:, axis.rank]
    return tokens, targets, Packing(samples, positions, one.documents, stream)


def learned_here(one: MicroBatch, mesh: Mesh) -> int:
    """Targets learned among the tokens that this rank has."""
    return int((_at(one.targets_BS, places(one.documents, one.tokens_BS.shape[1], mesh)) != IGNORED).sum())


def places(documents: Sequence[tuple[int, ...]], length: int, mesh: Mesh) -> Int64[np.ndarray, "_ L"]:
    """Where this rank's tokens stand in their sequences; one row where that is alike for all."""
    where, ranks = layout.coordinates(mesh.parallel, mesh.rank), mesh.parallel.ulysses
    rows = [np.arange(length)]
    if mesh.parallel.ring > 1 and documents:
        kinds = documents if len(set(documents)) > 1 else documents[:1]
        shared = (zigzag.stretches(lengths, mesh.parallel.ring)[where["ring"]] for lengths in kinds)
        rows = [np.concatenate([np.arange(one.start, one.stop) for one in stretches]) for stretches in shared]
    elif mesh.parallel.ring > 1:
        rows = [rows[0][: length // mesh.parallel.ring]]  # no sequence at all
    stretch = layout.share(0, len(rows[0]), ranks, where["ulysses"])
    return np.stack([row[stretch.start : stretch.stop] for row in rows])


def _at(x_BS: Int64[np.ndarray, "B S"], places: Int64[np.ndarray, "_ L"]) -> Int64[np.ndarray, "B L"]:
    return x_BS if places.shape[1] == x_BS.shape[1] else np.take_along_axis(x_BS, places, axis=1)


def in_rank_order(x_BS: Shaped[Tensor, "B S"], ranks: int) -> Shaped[Tensor, "tB R"]:
    """Whole sequences as the gathered stream has them."""
    batch, length = x_BS.shape
    return x_BS.view(batch, ranks, length // ranks).transpose(0, 1).reshape(ranks * batch, length // ranks)
