"""Two axes over one slow link: what one has in flight there is finished before the other begins."""

import itertools
import time

import pytest
import torch
import torch.distributed as dist
from ranks import once

from outlast.comm.collectives import Axis, Counts
from outlast.comm.link import Link
from outlast.intervals import most_intervals


class Flown:
    """A transfer that keeps when it was over."""

    def __init__(self, clock):
        self.clock, self.end = clock, None

    def wait(self):
        self.end = self.end if self.end is not None else next(self.clock)


def test_another_axis_waits_and_the_same_one_does_not():
    clock, link, flights = itertools.count(), Link(), []
    for axis in ("ring", "ring", "dp", "ring"):
        link.clear(axis)
        flights.append((axis, next(clock), flight := Flown(clock)))
        link.enter(axis, flight)
    flights[-1][2].wait()
    times = [(start, flight.end) for _, start, flight in flights]
    assert times == [(0, 2), (1, 3), (4, 5), (6, 7)]  # the ring's two overlap


def crossed(shared):
    """On a rank of 2 x 2: both axes shift by turns without waiting; when each began and was over."""
    rank, link = dist.get_rank(), Link()
    groups = once(made)
    axes = [Axis(name, groups[name, rank], Counts()) for name in ("ring", "dp")]
    for axis in axes:
        axis.link = link if shared else None
    seen, last, begun, send = [], [], [], dist.batch_isend_irecv

    def looked(ops):
        begun.append(time.perf_counter())
        return send(ops)

    dist.batch_isend_irecv = looked
    for turn in range(8):
        axis = axes[turn % 2]
        into = torch.empty(1000)
        if turn == 6:  # what is not in flight has to wait too
            axis.all_reduce(torch.ones(4))
        flight = axis.shift([torch.full((1000,), float(turn))], [into])
        wait = flight.wait
        over = []

        def waited(wait=wait, over=over):
            wait()
            over.append(time.perf_counter())

        flight.wait = waited
        seen.append((begun[-1], over))
        last.append((flight, into))
    dist.batch_isend_irecv = send
    for turn, (flight, into) in enumerate(last):
        flight.wait()
        assert into.eq(turn).all()
    return [(began, over[0]) for began, over in seen]


def made():
    """Process groups of a 2 x 2 grid: the ring along rows, dp along columns."""
    rank, groups = dist.get_rank(), {}
    for name, those in (("ring", ((0, 1), (2, 3))), ("dp", ((0, 2), (1, 3)))):
        for some in those:
            group = dist.new_group(some)
            if rank in some:
                groups[name, rank] = group
    return groups


@pytest.mark.parametrize("shared", [True, False])
def test_axes_on_one_link_are_never_in_flight_together(ranks, shared):
    """Begun by turns and waited for at the end: on one link none of eight overlaps another, else all do."""
    for flights in ranks.run(4, crossed, shared):
        began = [first for first, _ in flights]
        assert began == sorted(began)
        assert len(most_intervals(flights)) == (8 if shared else 1)
