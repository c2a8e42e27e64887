"""A micro-batch as the ranks of one copy take it: which positions of the residual stream are whose, and in which order.

Under sequence parallelism rank i of t has the stream at the i-th stretch of S/t positions of each sequence. What is
gathered from all of them stands in *rank order*: t·B rows of S/t positions, row i·B + b being rank i's stretch of
sequence b. Tokens, targets and positions come in that order, and nothing has to be copied to bring it about.
"""

import torch
from jaxtyping import Shaped
from torch import Tensor

from outlast.data.batches import MicroBatch
from outlast.model.transformer import Packing
from outlast.parallel.mesh import Mesh


def inputs(one: MicroBatch, mesh: Mesh) -> tuple[Tensor, Tensor, Packing]:
    """What the model takes on this rank: tokens, targets, and where they stand."""
    tokens, targets, places, samples = (
        torch.from_numpy(array).to(mesh.device, non_blocking=True)
        for array in (one.tokens_BS, one.targets_BS, one.places_BS, one.positions_B)
    )
    stream_R = torch.arange(tokens.shape[1], device=mesh.device)
    if mesh.parallel.sp and "tp" in mesh.axes:
        axis = mesh.axes["tp"]
        tokens, targets, places = (in_rank_order(x, axis.size) for x in (tokens, targets, places))
        stream_R = stream_R.view(axis.size, -1)[axis.rank]
    return tokens, targets, Packing(samples, places, one.documents, stream_R)


def in_rank_order(x_BS: Shaped[Tensor, "B S"], ranks: int) -> Shaped[Tensor, "tB R"]:
    """Whole sequences as the gathered stream has them."""
    batch, length = x_BS.shape
    return x_BS.view(batch, ranks, length // ranks).transpose(0, 1).reshape(ranks * batch, length // ranks)
