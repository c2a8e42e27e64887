"""What the links between a run's ranks do, measured: a few seconds at the first start, then kept beside the run.

Everything is timed by all ranks at once, as it will be used: what one rank alone could do on a machine that several share
says little. Small transfers are repeated, and the median taken; large ones grow until one takes long enough to tell a rate.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from outlast.comm import algorithms
from outlast.comm.collectives import Axis
from outlast.links import Library, Profile
from outlast.schedules import Group, schedule

_SMALL: Final = 1 << 10
_MOST: Final = 1 << 26
"""Bytes of the smallest and the largest transfer."""
_ENOUGH_S: Final = 0.1
"""Seconds in which a rate shows."""
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
    inside, near = clock.shifted(mine, 1)
    far = [clock.shifted(leaders, step) for step in range(1, min(len(leaders), _FAR + 1))]
    told = world.gather_objects((inside, near, far, clock.sums()))
    rates = [0.0] * len(leaders)
    for step in range(len(far)):
        for at, leader in enumerate(leaders):  # what came from one host to the other both can do at the least
            for host in (at, (at - step - 1) % len(leaders)):
                rates[host] = max(rates[host], told[leader][2][step][1])
    inside = statistics.median([one[0] for one in told if one[0]] or [0.0])
    between = statistics.median([delay for one in told for delay, _ in one[2] if delay] or [inside])
    rates = [rate or 1e12 for rate in rates]
    profile = Profile(
        hosts=tuple(hosts),
        inside=inside or between,
        inside_rate=min((one[1] for one in told if one[1]), default=max(rates)),
        between=between,
        rates=tuple(rates),
        message=clock.message(hosts, between if len(leaders) > 1 else inside),
        sums=min(one[3] for one in told),
        library=tuple(one for name, axis in axes.items() if name != "checkpoint" for one in clock.library(axis, hosts)),
    )
    return world.gather_objects(profile)[0]


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
        return max(self.world.gather_objects(self.seconds(work, times)))

    def small(self, work: Callable[[], object]) -> float:
        """Median of several, of the slowest rank; one untimed before."""
        work()
        return statistics.median(self.slowest(work, 10) for _ in range(5))

    def sizes(self, seconds: Callable[[int], float]) -> Iterator[tuple[int, float]]:
        """Sizes eight times the one before, each with what it took, until one took long enough."""
        size = _SMALL
        while True:
            took = seconds(size)
            yield size, took
            if took > _ENOUGH_S or size >= _MOST:
                return
            size *= 8

    def shifted(self, among: list[int], step: int) -> tuple[float, float]:
        """Latency, and bytes/s at which this rank receives, where each of some ranks sends to the one `step` on.

        All ranks of the run call it, with the ranks among which they stand; nothing for one that is not among them, or alone.
        """
        rank, n = self.world.rank, len(among)
        at = among.index(rank) if rank in among and n > 1 else -1
        leaving: list[dist.Work] = []

        def shift(out: Tensor, into: Tensor) -> None:
            if at >= 0:
                back, onward = among[(at - step) % n], among[(at + step) % n]
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
            return max(self.world.gather_objects(mine[-1]))

        out, into = self._of(_SMALL), self._of(_SMALL)
        self.seconds(lambda: shift(out, into), 1, left)
        delay = statistics.median(self.seconds(lambda: shift(out, into), 10, left) for _ in range(5))
        mine: list[float] = []
        *_, (size, _) = self.sizes(timed)
        return (delay, size / max(mine[-1] - delay, 1e-9)) if at >= 0 else (0.0, 0.0)

    def message(self, hosts: Sequence[int], latency: float) -> float:
        """Seconds that a further message in a round costs: everyone to everyone at once, less the latency."""
        n, rank = self.world.size, self.world.rank
        if n == 2:
            return 0.0
        group = Group(tuple(hosts), tuple(range(n)))
        plan, flat = schedule("all_gather", "direct", 4 * n, group), self._of(4 * n)
        took = self.small(lambda: algorithms.work(flat, plan, rank, self.world.group))
        return max(0.0, (took - latency) / (n - 2))

    def sums(self) -> float:
        """Bytes/s that this rank adds while all others do so too."""
        x, y = self._of(1 << 22), self._of(1 << 22)
        x.add_(y)
        return (1 << 22) / self.seconds(lambda: x.add_(y), 5)

    def library(self, axis: Axis, hosts: Sequence[int]) -> list[Library]:
        """The library's own, over every group along an axis at once."""
        of_group = tuple(hosts[rank] for rank in dist.get_process_group_ranks(axis.group))
        ops = ("all_reduce",) if dist.get_backend(axis.group) == "gloo" else ("all_reduce", "all_gather", "reduce_scatter")
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
                one
                for told in self.world.gather_objects(Library(op, of_group, tuple(self.sizes(timed))))
                for one in [told]
            ]
        return list(dict.fromkeys(found))
