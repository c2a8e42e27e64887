"""What the links between a run's ranks do, measured: a few seconds at the first start, then kept beside the run.

Everything is timed by all ranks at once, as it will be used: what one rank alone could do on a machine that several share
says little. Small transfers are repeated, and the least taken; large ones grow until one takes long enough to tell a rate.
"""

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from outlast.comm import algorithms
from outlast.comm.collectives import Axis
from outlast.links import Library, Profile, seconds
from outlast.schedules import ALGORITHMS, Group, schedule

_SMALL: Final = 1 << 10
_MOST: Final = 1 << 26
"""Bytes of the smallest and the largest transfer."""
_ENOUGH_S: Final = 0.1
"""Seconds in which a rate shows."""
_PART: Final = 1 << 16
"""Bytes that a ring passes on to see what a link carries at once."""
_STALL: Final = 10
"""Latencies: what a crowded link loses less than that is no more than other things take."""
_FAR: Final = 4
"""To how many hosts each is tried."""


def measure(hosts: Sequence[int], axes: Mapping[str, Axis], device: torch.device) -> Profile:
    """Measure the links of a run; every rank takes part, and gets the same.

    Args:
        hosts: number of each rank's host, as :class:`outlast.links.Profile` has them.
        axes: by name, `world` among them; of each the library's own all-reduce is timed, and where the library has them too,
            its other collectives.
        device: where the ranks compute.
    """
    clock = _Clock(axes["world"], device)
    world, leaders = axes["world"], [hosts.index(host) for host in range(max(hosts) + 1)]
    mine = [rank for rank, host in enumerate(hosts) if host == hosts[world.rank]]
    near = clock.shifted(mine, 1)
    far = [clock.shifted(leaders, step) for step in range(1, min(len(leaders), _FAR + 1))]
    told = world.gather_objects((near, far, clock.sums()))
    rates = [0.0] * len(leaders)
    for step in range(len(far)):
        for at, leader in enumerate(leaders):  # what came from one host to the other both can do at the least
            for host in (at, (at - step - 1) % len(leaders)):
                rates[host] = max(rates[host], told[leader][1][step])
    profile = Profile(
        hosts=tuple(hosts),
        inside=0.0,
        inside_rate=min((one[0] for one in told if one[0]), default=max(rates)),
        between=0.0,
        rates=tuple(rate or 1e12 for rate in rates),
        sums=min(one[2] for one in told),
        library=tuple(one for name, axis in axes.items() if name != "checkpoint" for one in clock.library(axis, hosts)),
    )
    return world.gather_objects(clock.crowded(clock.free(clock.delays(profile))))[0]


class _Clock:
    """Times what all ranks do together."""

    def __init__(self, world: Axis, device: torch.device) -> None:
        self.world, self.device = world, device
        self.mark = torch.zeros(1, device=device)

    def _of(self, size: int) -> Tensor:
        return torch.ones(size // 4, device=self.device)

    def seconds(self, work: Callable[[], object], times: int = 1, after: Callable[[], object] = lambda: None) -> float:
        """Of one call of several in a row, as this rank sees it, begun by all at once; what is done after is not timed."""
        dist.all_reduce(self.mark, group=self.world.group)
        self._ready()
        begun = time.perf_counter()
        for _ in range(times):
            work()
        self._ready()
        took = (time.perf_counter() - begun) / times
        after()
        return took

    def _ready(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def slowest(self, work: Callable[[], object], times: int = 1) -> float:
        """The same, of the rank that took longest."""
        return self._largest(self.seconds(work, times))

    def _largest(self, mine: float) -> float:
        told = torch.tensor([mine], dtype=torch.float64, device=self.device)
        dist.all_reduce(told, dist.ReduceOp.MAX, group=self.world.group)
        return told.item()

    def small(self, work: Callable[[], object], times: int = 10) -> float:
        """Least of several, each of so many in a row, of the slowest rank: what else the machine does only adds."""
        work()
        return min(self.slowest(work, times) for _ in range(5))

    def sizes(self, seconds: Callable[[int], float]) -> Iterator[tuple[int, float]]:
        """Sizes eight times the one before, each with what it took, until one took long enough."""
        size = _SMALL
        while True:
            took = seconds(size)
            yield size, took
            if (took > _ENOUGH_S and size > _SMALL) or size >= _MOST:  # two at least, for a line
                return
            size *= 8

    def _ends(self, seconds: Callable[[int], float]) -> tuple[tuple[int, float], ...]:
        """The smallest and the largest: between them a line is drawn, as it is for our own."""
        first, *_, last = self.sizes(seconds)
        return first, last

    def shifted(self, among: list[int], step: int) -> float:
        """Bytes/s at which this rank receives, where each of some ranks sends to another.

        All ranks of the run call it, with the ranks among which they stand, the receiver `step` on from the sender; 0 for one
        that is not among them, or alone.
        """
        rank, n = self.world.rank, len(among)
        at = among.index(rank) if rank in among and n > 1 else -1
        back, onward = among[(at - step) % n], among[(at + step) % n]
        leaving: list[dist.Work] = []
        mine: list[float] = []

        def shift(out: Tensor, into: Tensor) -> None:
            if at >= 0:
                ops = [dist.P2POp(dist.irecv, into, group=self.world.group, group_peer=back)]
                ops.append(dist.P2POp(dist.isend, out, group=self.world.group, group_peer=onward))
                first, *rest = dist.batch_isend_irecv(ops)
                first.wait()
                leaving.extend(rest)

        def left() -> None:
            for one in leaving:
                one.wait()
            leaving.clear()

        def timed(size: int) -> float:
            out, into = self._of(size), self._of(size)
            mine.append(self.seconds(lambda: shift(out, into), 1, left))
            return self._largest(mine[-1])

        (small, _), *_, (size, _) = self.sizes(timed)
        return (size - small) / max(mine[-1] - mine[0], 1e-9) if at >= 0 else 0.0

    def _by(self, op: str, algorithm: str, size: int, group: Group) -> Callable[[], object]:
        plan, flat = schedule(op, algorithm, size, group), self._of(size)
        return lambda: algorithms.work(flat, plan, self.world.rank, self.world.group)

    def delays(self, profile: Profile) -> Profile:
        """The profile with what messages take whatever is in them.

        Every algorithm is tried on next to nothing. What its rounds and messages count is known, so what each of them takes is
        the solution, none below 0, that leaves the least of the relative errors' squares.
        """
        group, names = profile.group(range(self.world.size)), ("inside", "between", "together", "message")
        nothing = dataclasses.replace(
            profile, inside_rate=math.inf, rates=(math.inf,) * len(profile.rates), sums=math.inf
        )
        rows, took, size = [], [], 64 * self.world.size
        for op in ("all_reduce", "all_gather"):
            for algorithm in ALGORITHMS[op]:
                units = (_with(nothing, {name: 1.0}) for name in names)
                took.append(self.small(self._by(op, algorithm, size, group)))
                rows.append([seconds(op, algorithm, size, group, unit) / took[-1] for unit in units])
        best, found = math.inf, dict.fromkeys(names, 0.0)
        counts, ones = torch.tensor(rows, dtype=torch.float64), torch.ones(len(rows), 1, dtype=torch.float64)
        for number in range(1, len(names) + 1):
            for some in itertools.combinations(range(len(names)), number):
                x = torch.linalg.lstsq(counts[:, some], ones, driver="gelsd").solution
                off = (counts[:, some] @ x - ones).square().sum().item()
                if (x >= 0).all() and off < best:
                    best, found = (
                        off,
                        dict.fromkeys(names, 0.0) | {names[i]: one.item() for i, one in zip(some, x, strict=True)},
                    )
        return _with(profile, found)

    def free(self, profile: Profile) -> Profile:
        """The profile with how many bytes of a round a link carries at once: what a ring is faster by than its rates tell."""
        group, n = profile.group(range(self.world.size)), self.world.size
        if len(profile.rates) == 1:
            return profile
        told = seconds("all_gather", "ring", n * _PART, group, profile)
        took = self.small(self._by("all_gather", "ring", n * _PART, group))
        return dataclasses.replace(profile, free=min(_PART, max(0.0, (told - took) / (n - 1) * min(profile.rates))))

    def crowded(self, profile: Profile) -> Profile:
        """The profile with what a link loses where everyone sends to everyone at once, beyond what the bytes take."""
        group, size = profile.group(range(self.world.size)), 64 * self.world.size
        busiest = max(profile.hosts.count(host) for host in set(profile.hosts))
        flows = busiest * (self.world.size - busiest)
        if self.world.size - busiest < 2 or flows < 3:
            return profile
        points, told = [], 0.0
        while told < _ENOUGH_S and size < _MOST:
            told = seconds("all_gather", "direct", size, group, profile)
            work = self._by("all_gather", "direct", size, group)
            times = 10 if told < _ENOUGH_S / 10 else 1
            took = statistics.mean(self.slowest(work, times) for _ in range(3))  # now and then, much: the mean shows it
            lost = took - told if took - told > _STALL * profile.between else 0.0
            points.append((flows * size // self.world.size, lost))
            size *= 4
        return dataclasses.replace(profile, crowded=tuple(points))

    def sums(self) -> float:
        """Bytes/s that this rank adds while all others do so too."""
        x, y = self._of(1 << 22), self._of(1 << 22)
        x.add_(y)
        return (1 << 22) / self.seconds(lambda: x.add_(y), 5)

    def library(self, axis: Axis, hosts: Sequence[int]) -> list[Library]:
        """The library's own, over every group along an axis at once."""
        of_group = tuple(hosts[rank] for rank in axis.ranks)
        ops = (
            ("all_reduce",)
            if dist.get_backend(axis.group) == "gloo"
            else ("all_reduce", "all_gather", "reduce_scatter")
        )
        found = []
        for op in ops:

            def timed(size: int, op: str = op) -> float:
                size = -(-size // (4 * axis.size)) * 4 * axis.size
                whole, part = self._of(size), self._of(size // axis.size)
                calls = {
                    "all_reduce": lambda: dist.all_reduce(whole, group=axis.group),
                    "all_gather": lambda: dist.all_gather_single(whole, part, group=axis.group),
                    "reduce_scatter": lambda: dist.reduce_scatter_single(part, whole, group=axis.group),
                }
                return self.small(calls[op]) if size < 1 << 17 else self.slowest(calls[op])

            found += [
                one for told in self.world.gather_objects(Library(op, of_group, self._ends(timed))) for one in [told]
            ]
        return list(dict.fromkeys(found))


def _with(profile: Profile, delays: dict[str, Any]) -> Profile:
    return dataclasses.replace(profile, **delays)
