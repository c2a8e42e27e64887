"""Every collective we call, counted by axis and operation: calls, bytes this rank sends, seconds it waits.

gloo's own reduce-scatter is an all-reduce inside, twice the bytes, and its all-gather copies more than it needs. Over gloo
both are made here of sends straight from and into the slices, and the sum is taken in rank order. Where an axis has been
given choices (:mod:`outlast.links`), these say for which sizes another algorithm takes its place.
"""

import contextlib
import functools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor

from outlast.comm import algorithms
from outlast.comm.link import Flight, Link
from outlast.layout import sent
from outlast.links import Choices
from outlast.schedules import Schedule, schedule


@dataclass
class Tally:
    """What one kind of collective came to.

    Attributes:
        calls: how many.
        bytes: sent by this rank, by the formula of :func:`outlast.layout.sent`.
        seconds: this rank could do nothing else.
    """

    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0


class Counts:
    """Tallies by (axis, operation), since they were last taken."""

    def __init__(self) -> None:
        self._tallies: dict[tuple[str, str], Tally] = {}
        self._events: list[tuple[Tally, torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def counted(self, axis: str, op: str, size: int, device: torch.device, calls: int = 1) -> Iterator[None]:
        """Count one call that sends `size` bytes; none, for the rest of the wait of one that was counted when it began.

        On a CUDA device the wait is what the stream spends in it, known only once the device has come that far.
        """
        tally = self._tallies.setdefault((axis, op), Tally())
        tally.calls += calls
        tally.bytes += size
        if device.type == "cuda":
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before.record()
            yield
            after.record()
            self._events.append((tally, before, after))
        else:
            started = time.perf_counter()
            yield
            tally.seconds += time.perf_counter() - started

    def take(self) -> dict[tuple[str, str], Tally]:
        """Hand out the tallies and begin new ones."""
        for tally, before, after in self._events:
            after.synchronize()
            tally.seconds += before.elapsed_time(after) / 1000
        taken, self._tallies, self._events = self._tallies, {}, []
        return taken


Works = tuple[Sequence[dist.Work], Sequence[dist.Work]]
"""Transfers under way: those that come in, those that go out."""


class InFlight(Flight):
    """A transfer that has begun and goes on by itself. Its tensors are not to be touched before :meth:`wait` is through."""

    def __init__(
        self, axis: "Axis", op: str, works: Sequence[dist.Work], device: torch.device, held: Sequence[Tensor]
    ) -> None:
        self._axis, self._op, self._works, self._device, self._held = axis, op, works, device, held

    def wait(self) -> None:
        """Have the tensors free to use; at once, where that has been done before.

        On CUDA the current stream waits, and the caller goes on.
        """
        if self._works:
            with self._axis.counts.counted(self._axis.name, self._op, 0, self._device, calls=0):
                for work in self._works:
                    work.wait()
            if self._axis.link is not None:
                self._axis.link.leave(self)
        self._works = self._held = ()


class Axis:
    """The ranks along one axis of the grid.

    Args:
        name: the axis.
        group: torch's process group of them.
        counts: where calls are counted.

    Attributes:
        freely: transfers go on whatever order they were posted in. NCCL's come one after the other: each waits for its
            partner.
        choices: algorithms to take; None where the library's are for everything.
        link: what it shares with other axes; None where it stays inside a host, or nothing is known of that.
    """

    def __init__(self, name: str, group: dist.ProcessGroup, counts: Counts) -> None:
        self.name, self.group, self.counts = name, group, counts
        self.ranks, self.rank = dist.get_process_group_ranks(group), dist.get_rank(group)
        self.size = len(self.ranks)
        self.freely = dist.get_backend(group) == "gloo"
        self.choices: Choices | None = None
        self.link: Link | None = None

    def _counted(self, op: str, whole: Tensor, size: int | None = None) -> contextlib.AbstractContextManager[None]:
        if self.link is not None:
            self.link.clear(self.name)
        bytes_ = sent(op, whole.numel() * whole.element_size(), self.size) if size is None else size
        return self.counts.counted(self.name, op, bytes_, whole.device)

    def _chosen(self, op: str, x: Tensor, size: int) -> tuple[Schedule, int] | None:
        """The messages of a collective of so many bytes, and what this rank sends in them; None: the library's own."""
        if self.choices is None:
            return None
        wide = algorithms.wide(x.dtype)
        choice = self.choices.of(op, size, wide)
        if choice.algorithm == "library":
            return None
        messages = schedule(op, choice.algorithm, size, self.choices.group, choice.segments)
        return messages, self.choices.sent(op, size, wide)

    @torch.compiler.disable
    def all_reduce(self, x: Shaped[Tensor, "*shape"], largest: bool = False) -> Shaped[Tensor, "*shape"]:
        """Sum over the ranks, in place; or take the largest."""
        chosen = None if largest else self._chosen("all_reduce", x, x.numel() * x.element_size())
        if chosen:
            with self._counted("all_reduce", x, chosen[1]):
                algorithms.work(x.view(-1), chosen[0], self.rank, self.group)
            return x
        with self._counted("all_reduce", x):
            dist.all_reduce(x, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=self.group)
        return x

    @torch.compiler.disable
    def all_gather(self, part: Shaped[Tensor, "N *rest"], out: Tensor | None = None) -> Shaped[Tensor, "nN *rest"]:
        """The parts of all ranks, one after the other along the first axis, in rank order."""
        part = part.contiguous()
        whole = part.new_empty((self.size * part.shape[0], *part.shape[1:])) if out is None else out
        chosen = self._chosen("all_gather", whole, whole.numel() * whole.element_size())
        with self._counted("all_gather", whole, chosen[1] if chosen else None):
            if chosen:
                whole.view(self.size, *part.shape)[self.rank].copy_(part)
                algorithms.work(whole.view(-1), chosen[0], self.rank, self.group)
            elif not self.freely:
                dist.all_gather_single(whole, part, group=self.group)
            else:
                parts = list(whole.view(self.size, *part.shape))
                parts[self.rank].copy_(part)
                self._exchange([part] * self.size, parts)
        return whole

    @torch.compiler.disable
    def reduce_scatter(self, whole: Shaped[Tensor, "nN *rest"], out: Tensor | None = None) -> Shaped[Tensor, "N *rest"]:
        """The rank's part, along the first axis, of the sum over the ranks; 16-bit types are summed in float32."""
        whole = whole.contiguous()
        part = whole.new_empty((whole.shape[0] // self.size, *whole.shape[1:])) if out is None else out
        chosen = self._chosen("reduce_scatter", whole, whole.numel() * whole.element_size())
        with self._counted("reduce_scatter", whole, chosen[1] if chosen else None):
            if chosen:
                flat = whole.view(-1).clone()  # whoever asks keeps theirs
                algorithms.work(flat, chosen[0], self.rank, self.group)
                return part.copy_(flat.view(self.size, *part.shape)[self.rank])
            if not self.freely:
                dist.reduce_scatter_single(part, whole, group=self.group)
                return part
            mine = list(whole.view(self.size, *part.shape))
            pieces = list(whole.new_empty((self.size - 1, *part.shape)))
            pieces.insert(self.rank, mine[self.rank])
            self._exchange(mine, pieces)
            return summed(pieces, part)

    def _exchange(self, outward: Sequence[Tensor], inward: Sequence[Tensor]) -> None:
        """Send part i to rank i and receive rank i's in `inward[i]`, contiguous all; this rank's own stay where they are."""
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        for works in self.post([(i, outward[i]) for i in others], [(i, inward[i]) for i in others]):
            for work in works:
                work.wait()

    def post(self, outward: Sequence[tuple[int, Tensor]], inward: Sequence[tuple[int, Tensor]]) -> Works:
        """Begin to send to some ranks and to receive from some. Not counted.

        Two ranks must post what goes between them in the same order; unless :attr:`freely`, both directions in one call.

        Args:
            outward: rank and what it gets, contiguous, not to be changed until waited for; nothing goes where it is empty.
            inward: rank and where what it sends is put.

        Returns:
            What to wait for: before what came in is read, and before what went out is changed.
        """
        ops = [dist.P2POp(dist.irecv, x, group=self.group, group_peer=i) for i, x in inward if x.numel()]
        arriving = len(ops)
        ops += [dist.P2POp(dist.isend, x, group=self.group, group_peer=i) for i, x in outward if x.numel()]
        works = dist.batch_isend_irecv(ops) if ops else []
        return (works[:arriving], works[arriving:]) if self.freely else (works, [])

    def during(
        self, op: str, device: torch.device, size: int = 0, calls: int = 0
    ) -> contextlib.AbstractContextManager[None]:
        """Count the time inside, and so many bytes and calls, for a collective made of posted transfers.

        It begins with what is counted as a call: the link is clear for it then.
        """
        if calls and self.link is not None:
            self.link.clear(self.name)
        return self.counts.counted(self.name, op, size, device, calls)

    def all_to_all(self, parts: Sequence[Tensor], into: Sequence[Tensor], even: bool = False) -> None:
        """Send part i to rank i, and receive rank i's part for this rank in `into[i]`: contiguous, any sizes.

        Args:
            parts: one for each rank.
            into: as many.
            even: all ranks' parts are of one size. Only then may another algorithm be chosen: what others send one
                another is not known here.
        """
        parts = [part.contiguous() for part in parts]
        if even and (chosen := self._chosen("all_to_all", parts[0], sum(part.numel() * part.element_size() for part in parts))):  # fmt: skip
            with self._counted("all_to_all", parts[0], chosen[1]):
                algorithms.exchange(parts, into, chosen[0], self.rank, self.group)
            return
        others = sum(part.numel() * part.element_size() for i, part in enumerate(parts) if i != self.rank)
        with self._counted("all_to_all", parts[self.rank], others):
            into[self.rank].copy_(parts[self.rank].view(into[self.rank].shape))
            self._exchange(parts, into)

    @torch.compiler.disable
    def shift(self, tensors: Sequence[Tensor], into: Sequence[Tensor], by: int = 1) -> InFlight:
        """Begin to send tensors to the rank `by` further on, and to receive those of the rank `by` before.

        Args:
            tensors: contiguous, at least one; not to be written before the handle's `wait` is through. Empty ones do not
                travel.
            into: as many, contiguous, of the other rank's sizes; not to be read before then.
            by: no multiple of the number of ranks; the same on all of them, as is the order in which they shift.

        Returns:
            What is to be waited for. Bytes and the call are counted now, under `shift`; seconds are those spent here and in
            `wait`.
        """
        onward, back = (self.rank + by) % self.size, (self.rank - by) % self.size
        ops = [dist.P2POp(dist.irecv, one, group=self.group, group_peer=back) for one in into if one.numel()]
        ops += [dist.P2POp(dist.isend, one, group=self.group, group_peer=onward) for one in tensors if one.numel()]
        size = sum(one.numel() * one.element_size() for one in tensors)
        with self._counted("shift", tensors[0], size):
            works = dist.batch_isend_irecv(ops) if ops else ()
        flying = InFlight(self, "shift", works, tensors[0].device, (*tensors, *into))
        if self.link is not None and works:
            self.link.enter(self.name, flying)
        return flying

    def gather_objects(self, mine: Any) -> list[Any]:
        """What every rank has to tell, in rank order: small things, now and then. Not counted."""
        told: list[Any] = [None] * self.size
        dist.all_gather_object(told, mine, group=self.group)
        return told


def summed(pieces: Sequence[Tensor], out: Tensor) -> Tensor:
    """The sum of at least two pieces in the order they come in; into 16 bits in float32. Wider pieces may be changed."""
    if out.element_size() < 4:
        return out.copy_(functools.reduce(Tensor.add_, pieces[1:], pieces[0].float()))
    return functools.reduce(Tensor.add_, pieces[2:], torch.add(pieces[0], pieces[1], out=out))


_GONE: Final = (
    *("connection closed by peer", "connection reset by peer", "broken pipe", "failed to recv"),  # gloo, and its store
    "remote process exited",  # NCCL
)
"""What an error says that only tells of another rank's end."""


def is_peer_loss(error: BaseException | None) -> bool:
    """Whether an error only says that another rank is gone, and not why."""
    while error is not None:
        told = str(error).lower()
        if isinstance(error, RuntimeError) and any(sign in told for sign in _GONE):
            return True
        error = error.__cause__ or error.__context__
    return False
