"""Less on the wire: sums over an axis of values sent in 16 bits, of the few largest, or of signs and a scale.

Every rank ends with the same bits, whichever it is. What the largest and the signs leave out the caller keeps and hands
in again with the next values (error feedback): nothing is lost, it comes later.
"""

from collections.abc import Sequence
from typing import Final

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from outlast import layout
from outlast.comm.collectives import Axis

_GATHER: Final = 0x0102040810204080


def sum_rounded(flat: Shaped[Tensor, "N"], axis: Axis) -> None:
    """Sum over the ranks, in place, values rounded to bfloat16 on the way there and on the way back.

    The sum itself is taken in float32. Each rank sums a stretch of the values; zeros fill up the last.
    """
    whole = flat.new_zeros(-(-flat.numel() // axis.size) * axis.size, dtype=torch.bfloat16)
    whole[: flat.numel()] = flat
    flat.copy_(axis.all_gather(axis.reduce_scatter(whole))[: flat.numel()])


def largest(x: Shaped[Tensor, "N"], count: int) -> Int[Tensor, "count"]:
    """Places of the elements of greatest magnitude, in ascending order; of equals the first ones.

    What is no number counts as infinite: it must be seen by all.
    """
    if count == 0:
        return torch.empty(0, dtype=torch.int64, device=x.device)
    size = x.abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)
    least = size.kthvalue(size.numel() - count + 1).values
    above = size > least
    equal = (size == least).nonzero().view(-1)[: count - int(above.sum())]
    above[equal] = True
    return above.nonzero().view(-1)


def sum_largest(values: Sequence[Shaped[Tensor, "..."]], share: float, axis: Axis) -> list[Tensor]:
    """Sum over the ranks of the elements that are largest on each: a place and a value of every one are sent.

    Args:
        values: some tensors, the same shapes on every rank, with what was left out before added. Left out now is what
            remains in them.
        share: of each tensor's elements to send; rounded up.
        axis: whose ranks.

    Source: Stich et al. 2018 (arXiv 1809.07599) algorithm 1, a tensor at a time.
    """
    flats = [value.view(-1) for value in values]
    places = [largest(flat, layout.largest(share, flat.numel())) for flat in flats]
    counts = [len(one) for one in places]
    sent = torch.cat([flat[one] for flat, one in zip(flats, places, strict=True)])
    for flat, one in zip(flats, places, strict=True):
        flat[one] = 0
    told = axis.all_gather(torch.cat((_bytes(torch.cat(places).to(torch.int32)), _bytes(sent)))[None])
    sums = [torch.zeros_like(flat) for flat in flats]
    for one in told:  # in rank order, so that every rank's sum has the same bits
        theirs = _numbers(one[: 4 * sum(counts)], torch.int32).split(counts)
        numbers = _numbers(one[4 * sum(counts) :], sent.dtype).split(counts)
        for total, at, number in zip(sums, theirs, numbers, strict=True):
            total.index_add_(0, at, number)
    return [total.view_as(value) for total, value in zip(sums, values, strict=True)]


def mean_of_signs(
    values: Sequence[Shaped[Tensor, "..."]], owed: Sequence[Tensor], owed_by_owner: Sequence[Tensor], axis: Axis
) -> None:
    """Mean over the ranks, in place, of values that travel as a sign each and a scale for each rank's rows of a tensor.

    Each rank owns some rows of every tensor (:func:`outlast.layout.chunk`). It is sent the others' signs there, averages
    what they stand for, and sends all the signs of that: one all-to-all, one all-gather.

    Args:
        values: some tensors, the same shapes on every rank. After it, what all ranks hold.
        owed: as large; what this rank left out before, and after it what it has left out by now.
        owed_by_owner: the rank's own rows of them: what the mean left out.
        axis: whose ranks.

    Source: Tang et al. 2021 (arXiv 2102.02888) algorithm 1, lines 6 to 11; the scale as of Bernstein et al. 2018
        (arXiv 1810.05291 section 3, from the L1 norm), the mean magnitude.
    """
    rows = [[layout.chunk(len(value), axis.size, rank) for value in values] for rank in range(axis.size)]
    outward = []
    for stretches in rows:
        pieces = [owe[r.start : r.stop] for owe, r in zip(owed, stretches, strict=True)]
        for piece, value, r in zip(pieces, values, stretches, strict=True):
            piece.add_(value[r.start : r.stop])
        outward.append(encoded(pieces))
        for piece, said in zip(pieces, decoded(outward[-1], pieces), strict=True):
            piece.sub_(said)
    inward = [torch.empty_like(outward[axis.rank]) for _ in range(axis.size)]
    axis.all_to_all(outward, inward)
    for one in inward:  # in rank order
        for total, said in zip(owed_by_owner, decoded(one, owed_by_owner), strict=True):
            total.add_(said, alpha=1 / axis.size)
    mine = encoded(owed_by_owner)
    for total, said in zip(owed_by_owner, decoded(mine, owed_by_owner), strict=True):
        total.sub_(said)
    # The first owns the most rows: the others' are filled up to as many bytes.
    told = axis.all_gather(torch.cat((mine, mine.new_zeros(len(outward[0]) - len(mine))))[None])
    for one, stretches in zip(told, rows, strict=True):
        pieces = [value[r.start : r.stop] for value, r in zip(values, stretches, strict=True)]
        for piece, said in zip(pieces, decoded(one, pieces), strict=True):
            piece.copy_(said)


def encoded(pieces: Sequence[Shaped[Tensor, "..."]]) -> Shaped[Tensor, "B"]:
    """The mean magnitude of each piece, and a bit for each element: whether it is not below zero."""
    scales = torch.stack([piece.abs().mean() if piece.numel() else piece.new_zeros(()) for piece in pieces])
    return torch.cat((_bytes(scales), packed(torch.cat([piece.reshape(-1) for piece in pieces]) >= 0)))


def decoded(told: Shaped[Tensor, "B"], like: Sequence[Shaped[Tensor, "..."]]) -> list[Tensor]:
    """What :func:`encoded` made of pieces of these shapes: plus or minus the scale everywhere."""
    width = len(like) * like[0].element_size()
    scales, sizes = _numbers(told[:width], like[0].dtype), [piece.numel() for piece in like]
    signs = unpacked(told[width:], sum(sizes), like[0].dtype).split(sizes)
    return [sign.mul_(scale).view_as(piece) for sign, scale, piece in zip(signs, scales, like, strict=True)]


def packed(bits: Shaped[Tensor, "N"]) -> Shaped[Tensor, "B"]:
    """Booleans, eight to a byte, the first in its lowest bit."""
    eights = bits.new_zeros(-(-len(bits) // 8) * 8)
    eights[: len(bits)] = bits
    # Eight bytes of 0 or 1 as one number: the product brings byte i to bit 56 + i.
    return (eights.view(torch.int64) * _GATHER >> 56 & 0xFF).to(torch.uint8)


def unpacked(told: Shaped[Tensor, "B"], count: int, kind: torch.dtype) -> Shaped[Tensor, "N"]:
    """The first `count` booleans of :func:`packed` bytes, as 1 and -1 of a type."""
    every = torch.arange(256, device=told.device)[:, None] >> torch.arange(8, device=told.device) & 1
    eights = (2 * every - 1).to(kind).index_select(0, told[: -(-count // 8)].to(torch.int32))
    return eights.view(-1)[:count]


def _bytes(numbers: Tensor) -> Tensor:
    return numbers.contiguous().view(torch.uint8)


def _numbers(told: Tensor, kind: torch.dtype) -> Tensor:
    return told.clone().view(kind)  # a copy, since a part of a row of bytes may not begin where a number can
