"""Ring attention: each rank keeps the queries of some tokens, and the keys and values of all pass by on a ring.

At step s a rank works with what the one s places before it began with, while the next keys and values are already on
their way. What the blocks come to is merged by their log-sum-exp, in float32 or finer. Backward the keys and values go
round once more, and their gradients after them: a block's are added to at each rank, a step later than it was there,
and end where it began. A rank's own block is worked on half its heads first and the other half last, so that the first
keys and the last gradients, too, travel under work.

Who has which tokens, and which blocks there are, is :mod:`outlast.parallel.zigzag`'s business.

Source: Liu et al. 2023 (arXiv 2310.01889).

Shapes: as in :mod:`outlast.model.transformer`, and L = S / R tokens on each of R ranks.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from outlast.comm.collectives import Axis
from outlast.model.loss import sum_dtype
from outlast.model.transformer import Packing, Transformer
from outlast.parallel import flash, zigzag
from outlast.parallel.mesh import Mesh


def apply(model: Transformer, mesh: Mesh) -> None:
    """Fill the seam of attention; nothing is done where the ring has but one rank."""
    if "ring" not in mesh.axes:
        return
    axis = mesh.axes["ring"]

    def attend(
        q: Float[Tensor, "B L H K"], k: Float[Tensor, "B L G K"], v: Float[Tensor, "B L G K"], packing: Packing, _: int
    ) -> Float[Tensor, "B L H K"]:
        return _Ring.apply(q, k, v, axis, packing.documents)

    model.fill(attend=attend)


def _blocks(
    documents: Sequence[tuple[int, ...]], axis: Axis, step: int
) -> Iterator[tuple[tuple[slice, slice], tuple[slice, slice], bool]]:
    """The rows of queries and of keys of each block of a step, and whether it is causal; sequences cut alike at once."""
    at_once = len(set(documents)) == 1
    rows = [slice(None)] if at_once else [slice(i, i + 1) for i in range(len(documents))]
    for row, lengths in zip(rows, documents, strict=False):
        for block in zigzag.blocks(lengths, axis.size, axis.rank, (axis.rank - step) % axis.size):
            yield (row, block.queries), (row, block.keys), block.causal


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, axis: Axis, documents: tuple[tuple[int, ...], ...]
    ) -> Tensor:
        exact = sum_dtype(q.dtype)
        out, lse = torch.empty_like(q, dtype=exact), q.new_empty(q.shape[:3], dtype=exact)
        for step, (keys, values) in enumerate(_passing(axis, k, v)):
            for here, there, causal in _blocks(documents, axis, step):
                mixed, sums = flash.attend(q[here], keys[there], values[there], causal)
                if causal:  # a token's own document: the first that it sees
                    out[here], lse[here] = mixed.to(exact), sums
                else:
                    out[here] = out[here].lerp(mixed.to(exact), torch.sigmoid(sums - lse[here])[..., None])
                    lse[here] = torch.logaddexp(lse[here], sums)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.axis, ctx.documents = axis, documents
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (q, k, v, out, lse), axis = ctx.saved_tensors, ctx.axis
        of_q = torch.zeros_like(q, dtype=sum_dtype(q.dtype))
        own, arriving = torch.zeros((2, *k.shape), dtype=of_q.dtype, device=k.device), k.new_empty(0)
        every, half = slice(0, k.shape[2]), (k.shape[2] + 1) // 2

        def add(step: int, keys: Tensor, values: Tensor, of_keys: Tensor, heads: slice) -> None:
            """Add what the blocks of a step give, of some key/value heads."""
            readers = slice(heads.start * q.shape[2] // k.shape[2], heads.stop * q.shape[2] // k.shape[2])
            for here, there, causal in _blocks(ctx.documents, axis, step):
                at, of = (*here, readers), (*there, heads)
                dq, dk, dv = flash.attend_backward(grads[0][at], q[at], keys[of], values[of], out[at], lse[at], causal)
                of_q[at] += dq
                of_keys[0][of] += dk
                of_keys[1][of] += dv

        flight = None
        for step, (keys, values) in enumerate(_passing(axis, k, v)):
            if step == 0:
                add(step, keys, values, own, slice(0, half))  # while the first of the others' come
                continue
            of_keys = torch.zeros_like(own)
            add(step, keys, values, of_keys, every)
            if flight:  # from the ranks that had these keys before
                flight.wait()
                of_keys += arriving
            arriving = torch.empty_like(of_keys)
            flight = axis.shift([of_keys], [arriving])
        if half < k.shape[2]:
            add(0, k, v, own, slice(half, k.shape[2]))  # while the last gradients go home
        if flight:
            flight.wait()
        of_k, of_v = own.add_(arriving)
        return of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype), None, None


def _passing(axis: Axis, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The keys and values of each rank, this one's first; while the caller works with one the next is on its way."""
    here = (k.contiguous(), v.contiguous())
    spare = [(torch.empty_like(here[0]), torch.empty_like(here[1])) for _ in range(min(2, axis.size - 1))]
    for step in range(axis.size - 1):
        following = spare[step % 2]
        flight = axis.shift(here, following)
        yield here
        flight.wait()
        here = following
    yield here
