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
    mine = _Sums(flat, schedule, rank)
    leaving: list[dist.Work] = []
    for receives, sends in schedule.of(rank):
        coming = [(move, mine.room(move)) for move in receives]
        ops = [dist.P2POp(dist.irecv, into, group=group, group_peer=move.sender) for move, into in coming]
        ops += [dist.P2POp(dist.isend, mine.told(move), group=group, group_peer=move.receiver) for move in sends]
        works = dist.batch_isend_irecv(ops)
        # One for each, those that receive first; or one for all, where the library makes it so.
        arriving = works[: len(coming)] if len(works) == len(ops) else works
        leaving += works[len(arriving) :]
        for one in arriving:
            one.wait()
        for move, into in coming:
            if move.adds:
                mine.part(mine.sums, move).add_(into)
    for one in leaving:
        one.wait()
    mine.round(0, flat.numel() * flat.element_size())


class _Sums:
    """What a rank has of a collective: its numbers, and beside those of 16 bits their sums in 32."""

    def __init__(self, flat: Tensor, schedule: Schedule, rank: int) -> None:
        self.flat, self.width = flat, flat.element_size()
        apart = wide(flat.dtype) > 1 and schedule.adds
        self.sums = flat.float() if apart else flat
        self.unrounded = list(schedule.owned[rank]) if apart else []

    def part(self, of: Tensor, move: Move) -> Tensor:
        """The stretch that a message carries."""
        return of[move.first // self.width : move.stop // self.width]

    def room(self, move: Move) -> Tensor:
        """Where a message is received: in its place, or, if it is to be added, beside it."""
        if not move.adds:
            return self.part(self.flat, move)
        return torch.empty_like(self.part(self.sums if move.summed else self.flat, move))

    def told(self, move: Move) -> Tensor:
        """What a message carries from here; a result that has just become one is rounded first."""
        if not move.adds:
            self.round(move.first, move.stop)
        return self.part(self.sums if move.summed else self.flat, move)

    def round(self, first: int, stop: int) -> None:
        """Put the sums that are complete here, in these bytes, in the place of the numbers."""
        for one in [own for own in self.unrounded if own[0] < stop and first < own[1]]:
            self.unrounded.remove(one)
            here = slice(one[0] // self.width, one[1] // self.width)
            self.flat[here] = self.sums[here]


def exchange(parts: Sequence[Tensor], into: Sequence[Tensor], schedule: Schedule, rank: int, group: dist.ProcessGroup) -> None:  # fmt: skip
    """Send part i to rank i, and receive rank i's in `into[i]`: contiguous, all of one size on all ranks.

    Args:
        parts: one for each rank.
        into: as many.
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
