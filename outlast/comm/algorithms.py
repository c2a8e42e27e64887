"""Collectives made of messages between two ranks, as a schedule says: all-reduce, all-gather, reduce-scatter, all-to-all.

A sum is taken in one place and handed to all who want it, so every rank has the same bits. The order of its terms is the
algorithm's, so another algorithm gives another rounding. 16-bit types are summed in float32, and rounded once: what carries
a sum then has four bytes a number, what one rank brought and what is the result two.
"""

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from outlast.schedules import Move, Schedule


def wide(dtype: torch.dtype) -> int:
    """How many times its bytes a sum of this type has on its way: 16-bit floats are summed in 32."""
    return 2 if dtype.is_floating_point and dtype.itemsize == 2 else 1


def work(flat: Tensor, schedule: Schedule, rank: int, group: dist.ProcessGroup) -> None:
    """Work through a schedule on a flat tensor, in place.

    Args:
        flat: of an all-reduce, what this rank brings; of a reduce-scatter too, and its own part is the sum after, the rest
            of no use; of an all-gather, the whole with this rank's part in it.
        schedule: for as many bytes.
        rank: this one.
        group: the ranks.
    """
    width = flat.element_size()
    sums = flat.float() if wide(flat.dtype) > 1 and schedule.adds else flat
    unrounded = list(schedule.owned[rank]) if sums is not flat else []

    def span(of: Tensor, move: Move) -> Tensor:
        return of[move.first // width : move.stop // width]

    def rounded(first: int, stop: int) -> None:
        for one in [own for own in unrounded if own[0] < stop and first < own[1]]:
            unrounded.remove(one)
            flat[one[0] // width : one[1] // width] = sums[one[0] // width : one[1] // width]

    leaving: list[dist.Work] = []
    for receives, sends in schedule.of(rank):
        coming = [
            (move, torch.empty_like(span(sums if move.summed else flat, move)) if move.adds else span(flat, move))
            for move in receives
        ]
        ops = [dist.P2POp(dist.irecv, into, group=group, group_peer=move.sender) for move, into in coming]
        for move in sends:
            if not move.adds:
                rounded(move.first, move.stop)
            source = span(sums if move.summed else flat, move)
            ops.append(dist.P2POp(dist.isend, source, group=group, group_peer=move.receiver))
        works = dist.batch_isend_irecv(ops)
        # One for each, those that receive first; or one for all, where the library makes it so.
        arriving = works[: len(coming)] if len(works) == len(ops) else works
        leaving += works[len(arriving) :]
        for one in arriving:
            one.wait()
        for move, into in coming:
            if move.adds:
                span(sums, move).add_(into)
    for one in leaving:
        one.wait()
    rounded(0, flat.numel() * width)


def exchange(parts: Sequence[Tensor], into: Sequence[Tensor], schedule: Schedule, rank: int, group: dist.ProcessGroup) -> None:  # fmt: skip
    """Send part i to rank i, and receive rank i's in `into[i]`: contiguous, all of one size on all ranks.

    Args:
        parts, into: one for each rank.
        schedule: of an all-to-all of these sizes.
        rank: this one.
        group: the ranks.
    """
    ranks, size = len(parts), parts[rank].numel()
    part = size * parts[rank].element_size()
    into[rank].copy_(parts[rank].view(into[rank].shape))
    held = {(rank * ranks + i) * part: one.view(-1) for i, one in enumerate(parts)}
    mine = {(i * ranks + rank) * part: one.view(-1) for i, one in enumerate(into) if i != rank}
    for receives, sends in schedule.of(rank):
        ops, coming = [], []
        for sender, several in itertools.groupby(receives, key=lambda move: move.sender):
            blocks = [move.first for move in several]
            straight = len(blocks) == 1 and blocks[0] in mine
            message = mine[blocks[0]] if straight else parts[rank].new_empty(len(blocks) * size)
            coming.append((blocks, message))
            ops.append(dist.P2POp(dist.irecv, message, group=group, group_peer=sender))
        for receiver, several in itertools.groupby(sends, key=lambda move: move.receiver):
            pieces = [held.pop(move.first) for move in several]
            message = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
            ops.append(dist.P2POp(dist.isend, message, group=group, group_peer=receiver))
        for one in dist.batch_isend_irecv(ops):
            one.wait()
        for blocks, message in coming:
            held.update(zip(blocks, message.split(size), strict=True))
    for block, one in mine.items():
        if held[block].data_ptr() != one.data_ptr():
            one.copy_(held[block])
