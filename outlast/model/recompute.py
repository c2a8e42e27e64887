"""What a block forgets after the forward pass and works out again in the backward pass: its attention, or all of it.

Nothing is stored to draw the same dropout masks again: they hang on places, not on an order of drawing. Collectives
inside what is worked out again happen again, on every rank in the same order. A recomputation ends where the last value
that the backward pass needs is there: what a block only adds or sends after that is not repeated.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from outlast.model.transformer import Packing, Seams, Transformer


def apply(model: Transformer, kind: str, blocks: int) -> None:
    """Have the first blocks of a model recompute.

    Weights that are gathered for a block (FSDP2) must be gathered by hooks put on it afterwards: these then lie around
    the recomputation, and it finds them gathered already.

    Args:
        model: its `attend` seam filled in, and its blocks compiled, if they are to be: recomputation goes around both.
        kind: `none`; `attention`, which keeps queries, keys and values of what the seam keeps; or `full`, which keeps a
            block's input.
        blocks: how many.

    Source: Chen et al. 2016 (arXiv 1604.06174); for `attention` Korthikanti et al. 2022 (arXiv 2205.05198) section 5.
    """
    if kind == "attention":
        model.fill(attend=_attention(model.seams.attend, blocks))
    if kind == "full":
        for block in model.layers[:blocks]:
            block.forward = _full(block.forward)


@torch.compiler.disable  # what is compiled inside stays so, in the forward pass and again
def _again(function: Callable[..., Tensor], *kept: Tensor) -> Tensor:
    return checkpoint(function, *kept, use_reentrant=False, preserve_rng_state=False)


def _attention(attend: Callable[..., Tensor], blocks: int) -> Callable[..., Tensor]:
    def attended(q: Tensor, k: Tensor, v: Tensor, packing: Packing, layer: int) -> Tensor:
        if layer >= blocks:
            return attend(q, k, v, packing, layer)
        return _again(lambda q, k, v: attend(q, k, v, packing, layer), q, k, v)

    return attended


def _full(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forwarded(x_BSD: Tensor, angles: tuple[Tensor, Tensor], packing: Packing, seams: Seams) -> Tensor:
        return _again(lambda x, cos, sin: forward(x, (cos, sin), packing, seams), x_BSD, *angles)

    return forwarded
