"""A stream of rows gathered or scattered in pieces, so that one is worked on while the next ones travel.

    for rows in (gathering := stream.gather(part)):     # this rank's own stretch first, then each piece as it comes
        work on gathering.whole[rows]

    for rows in (scattering := stream.scatter(whole)):  # what others get first, each sent as soon as it is made
        make scattering.whole[rows]
    part = scattering.total()                           # summed in rank order, whatever came first

Over gloo the transfers go on while this rank works: a thread of gloo's moves what was posted. The time counted is what
a rank spends to post them and to wait for them; what travels under its work costs none.

Source: Wang et al. 2023, "Overlap communication with dependent computation via decomposition" (ASPLOS), section 4.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor

from outlast.comm.collectives import Axis, summed
from outlast.comm.rows import EXACT, Code
from outlast.layout import share

_FEWEST_ROWS: Final = 8
"""In a piece: a product of fewer takes other kernels, and longer a row."""


@dataclass(frozen=True)
class Stream:
    """How rows of numbers move over an axis.

    Attributes:
        axis: whose ranks have a stretch of the rows each, in rank order.
        pieces: of all stretches together, the same number of each, so rounded up. 1: they go by one call of the
            collective, and nothing is handed out before it is over.
        code: how rows travel.
    """

    axis: Axis
    pieces: int = 1
    code: Code = EXACT

    def gather(self, part: Shaped[Tensor, "M E"], out: Shaped[Tensor, "N E"] | None = None) -> "Gathering":
        """Begin to gather this rank's stretch with those of the others."""
        return Gathering(self, part, out)

    def scatter(self, whole: Shaped[Tensor, "N E"], out: Shaped[Tensor, "M E"] | None = None) -> "Scattering":
        """Begin to sum rows that each rank is yet to make in `whole`, and to hand each its stretch."""
        return Scattering(self, whole, out)

    def all_gather(self, part: Shaped[Tensor, "B R E"]) -> Shaped[Tensor, "nB R E"]:
        """The stretches of all ranks, in rank order, at once."""
        whole = Stream(self.axis, 1, self.code).gather(part.flatten(0, 1)).finish()
        return whole.view(-1, *part.shape[1:])

    def reduce_scatter(self, whole: Shaped[Tensor, "nB R E"]) -> Shaped[Tensor, "B R E"]:
        """The rank's stretch of the sum over the ranks, at once."""
        total = Stream(self.axis, 1, self.code).scatter(whole.flatten(0, 1).contiguous()).at_once().total()
        return total.view(-1, *whole.shape[1:])

    def all_reduce(self, x: Shaped[Tensor, "*batch E"]) -> Shaped[Tensor, "*batch E"]:
        """Sum over the ranks, in place; coded, each rank sums a stretch and all get it as it was sent."""
        if self.code.exact:
            return self.axis.all_reduce(x)
        rows, once = x.view(-1, x.shape[-1]), Stream(self.axis, 1, self.code)
        once.gather(once.scatter(rows).at_once().total(), rows).finish()
        return x

    def own(self, rows: int) -> slice:
        """The stretch of this rank."""
        return self._stretch(rows, self.axis.rank)

    def others(self, rows: int) -> list[slice]:
        """The stretches of the others, in rank order."""
        return [self._stretch(rows, rank) for rank in range(self.axis.size) if rank != self.axis.rank]

    def _stretch(self, rows: int, rank: int) -> slice:
        mine = share(0, rows, self.axis.size, rank)
        return slice(mine.start, mine.stop)

    def cuts(self, rows: int) -> list[list[slice]]:
        """The pieces of each rank's stretch; as many of each."""
        each = max(1, min(-(-self.pieces // self.axis.size), rows // self.axis.size // _FEWEST_ROWS))
        stretches = (share(0, rows, self.axis.size, rank) for rank in range(self.axis.size))
        return [
            [slice(part.start, part.stop) for part in (share(one.start, one.stop, each, i) for i in range(each))]
            for one in stretches
        ]

    def rounds(self, rows: int) -> Iterator[tuple[int, int, int]]:
        """In which order pieces go: number of the piece, whom this rank's partner in it sends to, and who sends to it."""
        n, me = self.axis.size, self.axis.rank
        for piece, step in itertools.product(range(len(self.cuts(rows)[0])), range(1, n)):
            yield piece, (me + step) % n, (me - step) % n


class Gathering:
    """Stretches of all ranks on their way into one tensor; iterating over it waits for them piece by piece.

    Attributes:
        whole: they come to be here.
        own: the rows that are this rank's.
    """

    def __init__(self, stream: Stream, part: Shaped[Tensor, "M E"], out: Tensor | None) -> None:
        axis, code, part, self._stream = stream.axis, stream.code, part.contiguous(), stream
        self.whole = part.new_empty((axis.size * part.shape[0], *part.shape[1:])) if out is None else out
        self.own = stream.own(self.whole.shape[0])
        self._coming: list[tuple[slice, Tensor, Sequence[dist.Work]]] = []
        self._leaving: list[dist.Work] = []
        if stream.pieces == 1 and code.exact:
            axis.all_gather(part, self.whole)
            return
        cuts = stream.cuts(self.whole.shape[0])
        first = self.own.start
        self._sent = [code.encode(part[cut.start - first : cut.stop - first]) for cut in cuts[axis.rank]]
        size = (axis.size - 1) * sum(one.numel() * one.element_size() for one in self._sent)
        with axis.during("all_gather", part.device, size, calls=1):
            for piece, to, frm in stream.rounds(self.whole.shape[0]):
                rows = cuts[frm][piece]
                room = code.room(self.whole[rows])
                arriving, leaving = axis.post([(to, self._sent[piece])], [(frm, room)])
                self._coming.append((rows, room, arriving))
                self._leaving += leaving
        if code.exact:
            self.whole[self.own].copy_(part)
        for cut, one in zip(cuts[axis.rank], self._sent, strict=True):
            code.decode(one, self.whole[cut])  # as the others have it

    def __iter__(self) -> Iterator[slice]:
        """Rows as they are there, each once: this rank's own first; all at once where they are one piece."""
        if self._stream.pieces == 1:
            self.finish()
            yield slice(0, self.whole.shape[0])
            return
        yield self.own
        while self._coming:
            yield self._arrived()
        self.finish()

    def _arrived(self) -> slice:
        rows, room, works = self._coming.pop(0)
        _wait(self._stream.axis, "all_gather", works, self.whole.device)
        self._stream.code.decode(room, self.whole[rows])
        return rows

    def finish(self) -> Shaped[Tensor, "N E"]:
        """Wait for all that is still to come, and to go."""
        while self._coming:
            self._arrived()
        if self._leaving:
            _wait(self._stream.axis, "all_gather", self._leaving, self.whole.device)
            self._leaving, self._sent = [], []
        return self.whole


class Scattering:
    """Rows on their way to the ranks that sum them; iterating over it says which to make next.

    Attributes:
        whole: where they are to be made; not to be changed before the total is taken.
    """

    def __init__(self, stream: Stream, whole: Shaped[Tensor, "N E"], out: Tensor | None) -> None:
        self._stream, self.whole, self._own = stream, whole, stream.own(whole.shape[0])
        self._cuts = stream.cuts(whole.shape[0])
        self._out = torch.empty_like(whole[self._own]) if out is None else out
        self._summed = False
        self._coming: list[tuple[Tensor, Tensor, Sequence[dist.Work]]] = []
        self._leaving: list[tuple[Tensor, Sequence[dist.Work]]] = []
        self._pieces: list[Tensor] = []

    def __iter__(self) -> Iterator[slice]:
        """The rows to make, each once: what others get first. All at once where they are one piece, and waited for."""
        if self._stream.pieces == 1:
            yield slice(0, self.whole.shape[0])
            self.at_once()
            return
        self._begin()
        for piece, to, frm in self._stream.rounds(self.whole.shape[0]):
            yield self._cuts[to][piece]
            self._send(piece, to, frm)
        yield self._own

    def at_once(self) -> "Scattering":
        """Begin to send all, which is made; wait for it where rows are one piece."""
        if self._stream.pieces == 1 and self._stream.code.exact:
            self._stream.axis.reduce_scatter(self.whole, self._out)
            self._summed = True
            return self
        self._begin()
        for piece, to, frm in self._stream.rounds(self.whole.shape[0]):
            self._send(piece, to, frm)
        if self._stream.pieces == 1:
            self.total()
        return self

    def _begin(self) -> None:
        """Make room, and where transfers go freely let others send as soon as they can."""
        axis, code, whole = self._stream.axis, self._stream.code, self.whole
        kind = whole.dtype if code.exact else torch.promote_types(whole.dtype, torch.float32)
        self._pieces = list(whole.new_empty((axis.size - 1, *self._out.shape), dtype=kind))
        self._pieces.insert(axis.rank, self._out[:0])  # this rank's is taken when it is made
        with axis.during("reduce_scatter", whole.device, calls=1):
            for piece, _, frm in self._stream.rounds(whole.shape[0]) if axis.freely else ():
                self._post([], piece, frm)

    def _send(self, piece: int, to: int, frm: int) -> None:
        sent = self._stream.code.encode(self.whole[self._cuts[to][piece]])
        axis = self._stream.axis
        with axis.during("reduce_scatter", self.whole.device, sent.numel() * sent.element_size()):
            if axis.freely:
                self._leaving.append((sent, axis.post([(to, sent)], [])[1]))
            else:
                self._post([(to, sent)], piece, frm)

    def _post(self, outward: Sequence[tuple[int, Tensor]], piece: int, frm: int) -> None:
        cut, first = self._cuts[self._stream.axis.rank][piece], self._own.start
        into = self._pieces[frm][cut.start - first : cut.stop - first]
        room = self._stream.code.room(into)
        arriving, _ = self._stream.axis.post(outward, [(frm, room)])
        self._coming.append((into, room, arriving))
        self._leaving += [(sent, ()) for _, sent in outward]

    def total(self) -> Shaped[Tensor, "M E"]:
        """The rank's stretch of the sum, once it is there: in rank order, 16-bit types in float32."""
        if self._summed:
            return self._out
        axis, device, n = self._stream.axis, self.whole.device, self._stream.axis.size
        self._pieces[axis.rank] = self.whole[self._own].to(self._pieces[axis.rank - 1].dtype)
        for cut in self._cuts[axis.rank]:
            for into, room, works in self._coming[: n - 1]:
                _wait(axis, "reduce_scatter", works, device)
                self._stream.code.decode(room, into)
            del self._coming[: n - 1]
            rows = slice(cut.start - self._own.start, cut.stop - self._own.start)
            summed([one[rows] for one in self._pieces], self._out[rows])
        for _, works in self._leaving:
            _wait(axis, "reduce_scatter", works, device)
        self._pieces, self._leaving, self._summed = [], [], True
        return self._out


def _wait(axis: Axis, op: str, works: Sequence[dist.Work], device: torch.device) -> None:
    with axis.during(op, device):
        for work in works:
            work.wait()
