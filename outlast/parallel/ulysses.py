"""Ulysses: ranks share the tokens of a sequence, and for attention exchange them for heads.

Each rank comes with all heads of S/u tokens. One all-to-all makes of queries, keys and values whole sequences of H/u
heads; attention is as on one device; another all-to-all brings its output back. Where there are fewer key/value heads
than ranks, each rank gets the one its queries read, and the gradients of the copies are summed.

Source: Jacobs et al. 2023 (arXiv 2309.14509), section 3; with a ring outside, Fang and Zhao 2024 (arXiv 2405.07719).

Shapes: as in :mod:`outlast.model.transformer`, and u ranks, L tokens on each, h = H/u query and g = max(1, G/u)
key/value heads.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from outlast.comm.collectives import Axis
from outlast.model.loss import sum_dtype
from outlast.model.transformer import Packing, Transformer
from outlast.parallel.mesh import Mesh


def apply(model: Transformer, mesh: Mesh) -> None:
    """Put the exchange around the model's attention; nothing is done where `ulysses` has but one rank."""
    if "ulysses" not in mesh.axes:
        return
    axis, inner = mesh.axes["ulysses"], model.seams.attend

    def attend(
        q: Float[Tensor, "B L H K"],
        k: Float[Tensor, "B L G K"],
        v: Float[Tensor, "B L G K"],
        packing: Packing,
        layer: int,
    ) -> Float[Tensor, "B L H K"]:
        return _Back.apply(inner(*_Exchange.apply(q, k, v, axis), packing, layer), axis)

    model.fill(attend=attend)


def _heads(count: int, ranks: int, rank: int) -> slice:
    """Which heads a rank works with: its share, or the one it reads where there are fewer than ranks."""
    if count >= ranks:
        return slice(rank * count // ranks, (rank + 1) * count // ranks)
    return slice(rank * count // ranks, rank * count // ranks + 1)


def _to_heads(axis: Axis, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Of several (B L heads K) whole sequences (B uL heads/u K), in one all-to-all."""
    outward = [torch.cat([x[:, :, _heads(x.shape[2], axis.size, i)] for x in tensors], dim=2) for i in range(axis.size)]
    inward = outward[0].new_empty((axis.size, *outward[0].shape))
    axis.all_to_all(outward, list(inward), even=True)
    whole = inward.transpose(0, 1).flatten(1, 2)
    return list(whole.split([max(1, x.shape[2] // axis.size) for x in tensors], dim=2))


def _to_tokens(axis: Axis, tensors: Sequence[Tensor], heads: Sequence[int]) -> list[Tensor]:
    """The other way round, to so many heads of each; a head that several ranks had is summed, in rank order."""
    joined = tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim=2)
    outward = joined.unflatten(1, (axis.size, -1)).transpose(0, 1).contiguous()
    inward = torch.empty_like(outward)
    axis.all_to_all(list(outward), list(inward), even=True)
    found = []
    parts = inward.split([x.shape[2] for x in tensors], dim=3)
    for part, count in zip(parts, heads, strict=True):
        if count >= axis.size:
            found.append(part.permute(1, 2, 0, 3, 4).flatten(2, 3))
        else:
            copies = part.unflatten(0, (count, -1)).to(sum_dtype(part.dtype)).sum(1)
            found.append(copies.permute(1, 2, 0, 3, 4).flatten(2, 3).to(part.dtype))
    return found


class _Exchange(torch.autograd.Function):
    """Queries, keys and values of some tokens to those of some heads."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, axis: Axis) -> tuple[Tensor, ...]:
        ctx.axis, ctx.heads = axis, [x.shape[2] for x in (q, k, v)]
        return tuple(_to_heads(axis, (q, k, v)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (*_to_tokens(ctx.axis, grads, ctx.heads), None)


class _Back(torch.autograd.Function):
    """Attention's output of some heads to that of some tokens."""

    @staticmethod
    def forward(ctx: Any, mixed: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _to_tokens(axis, (mixed,), (mixed.shape[2] * axis.size,))[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _to_heads(ctx.axis, (grads[0],))[0], None
