"""Times and bytes of collectives: against the papers' formulas, a simulation of every message, and what ranks send."""

import dataclasses
import itertools
import json
import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast import layout, links
from outlast.comm.collectives import Axis, Counts
from outlast.errors import OutlastError
from outlast.links import Choice, Library, Profile
from outlast.schedules import ALGORITHMS, schedule

A, RATE = 1e-3, 1e6


def equal(n):
    """n hosts with a rank each, a millisecond and a megabyte a second from one another."""
    return Profile(tuple(range(n)), A, math.inf, A, (RATE,) * n)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_equal_links_by_the_papers_formulas(n):
    """Chan et al. 2007, table 1: with a latency A and M bytes."""
    m, profile = 6400 * n, equal(n)
    group, most, log = profile.group(range(n)), (n - 1) / n * m / RATE, math.log2(n)
    half = {"direct": A + most, "ring": (n - 1) * A + most, "halving": log * A + most}
    for algorithm, wanted in half.items():
        for op, times in (("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)):
            assert links.seconds(op, algorithm, m, group, profile) == pytest.approx(times * wanted), (op, algorithm)
    assert links.seconds("all_to_all", "direct", m, group, profile) == pytest.approx(A + most)
    assert links.seconds("all_to_all", "ring", m, group, profile) == pytest.approx((n - 1) * A + most)
    # Bruck et al. 1997: in each of log2(n) rounds, half of everything.
    assert links.seconds("all_to_all", "halving", m, group, profile) == pytest.approx(log * (A + m / 2 / RATE))


def test_a_tree_by_hand():
    """Four ranks: 3 to 1, 1 and 2 to 0, and back. In one segment the root's link carries M, 2 M in, then 2 M and M out."""
    profile = equal(4)
    group, m = profile.group(range(4)), 64000
    assert links.seconds("all_reduce", "tree", m, group, profile) == pytest.approx(4 * A + 6 * m / RATE)
    # In two, rounds overlap: 5 of them. 1: half of 3's; 2: the next, and half of 1's and 2's; 3: theirs, and half out to
    # both; 4: the next half out to both, and half to 3; 5: the last to 3. Each in the busiest link: 1/2, 1, 1, 1, 1/2.
    assert links.seconds("all_reduce", "tree", m, group, profile, segments=2) == pytest.approx(5 * A + 4 * m / RATE)


def test_two_hosts_of_two():
    """A ring crosses once with each of 2 x 3/4 M; in lanes each host sends half and half; both at the network's rate."""
    profile = Profile((0, 0, 1, 1), 0.0, math.inf, 0.0, (RATE, RATE))
    group, m = profile.group(range(4)), 64000
    assert links.seconds("all_reduce", "ring", m, group, profile) == pytest.approx(1.5 * m / RATE)
    assert links.seconds("all_reduce", "hierarchical", m, group, profile) == pytest.approx(m / RATE)
    assert links.seconds("all_gather", "direct", m, group, profile) == pytest.approx(m / RATE)
    assert links.seconds("all_gather", "hierarchical", m, group, profile) == pytest.approx(m / 2 / RATE)
    assert links.choose("all_reduce", m, group, profile).algorithm == "hierarchical"


def simulated(op, algorithm, size, group, profile, segments):
    """Seconds by letting every message go its way: a rank sends those of a round when it has all of the rounds before;
    what shares a link in a round goes through it at once, a link takes round after round."""
    ready, free = [0.0] * group.size, {}
    for moves in schedule(op, algorithm, size, group, segments).rounds:
        loads, begins, arrive = {}, {}, list(ready)
        for move in moves:
            for way, host in (("out", group.hosts[move.sender]), ("in", group.hosts[move.receiver])):
                loads[way, host] = loads.get((way, host), 0) + move.bytes
                begins[way, host] = max(begins.get((way, host), free.get((way, host), 0.0)), ready[move.sender] + A)
        over = {at: begins[at] + size / profile.rates[at[1]] for at, size in loads.items()}
        for move in moves:
            done = max(over["out", group.hosts[move.sender]], over["in", group.hosts[move.receiver]])
            arrive[move.receiver] = max(arrive[move.receiver], done)
        free |= over
        ready = arrive
    return max(ready)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_where_all_keep_step_the_sum_of_rounds_is_what_a_simulation_gives(n):
    profile = equal(n)
    group = profile.group(range(n))
    for op, those in ALGORITHMS.items():
        for algorithm in set(those) - {"tree"}:
            told = links.seconds(op, algorithm, 640 * n, group, profile)
            assert told == pytest.approx(simulated(op, algorithm, 640 * n, group, profile, 1)), (op, algorithm)


@settings(max_examples=60, deadline=None)
@given(st.integers(3, 8), st.integers(1, 4), st.sampled_from((1, 3, 8)))
def test_elsewhere_it_is_not_below_and_not_twice_the_simulation(n, slow, segments):
    """A tree, or a slow link: a rank may be in a later round than another."""
    profile = dataclasses.replace(equal(n), rates=(*(RATE,) * (n - 1), RATE / slow))
    group = profile.group(range(n))
    for op, algorithm in (("all_reduce", "tree"), ("all_reduce", "ring"), ("all_gather", "halving")):
        told = links.seconds(op, algorithm, 6400 * n, group, profile, segments=segments)
        true = simulated(op, algorithm, 6400 * n, group, profile, segments if algorithm == "tree" else 1)
        assert true * (1 - 1e-9) <= told <= 2.5 * true, (algorithm, told, true)


PROFILES = [
    equal(2),
    equal(5),
    dataclasses.replace(equal(4), rates=(RATE, RATE, RATE, RATE / 4), together=1e-4),
    Profile((0, 0, 1, 1, 1), 1e-4, 1e8, 1e-3, (RATE, RATE), message=2e-4, sums=1e8, crowded=((1000, 0.0), (9000, 0.01))),
    Profile((0, 1, 0, 1), 1e-4, 1e8, 1e-3, (RATE, RATE), library=(Library("all_reduce", (0, 1, 0, 1), ((1000, 1e-3), (9000, 1e-3))),)),
]  # fmt: skip


@pytest.mark.parametrize("profile", PROFILES, ids=range(len(PROFILES)))
def test_the_choice_is_the_fastest_but_for_the_library_if_that_is_near(profile):
    group = profile.group(range(len(profile.hosts)))
    for op, size in itertools.product(ALGORITHMS, (0, 60, 60_000, 6_000_000)):
        times = {"library": links.seconds(op, "library", size, group, profile)}
        for algorithm in ALGORITHMS[op]:
            segments = links.best_segments(size, group, profile) if algorithm == "tree" else 1
            times[algorithm] = links.seconds(op, algorithm, size, group, profile, segments=segments)
        choice = links.choose(op, size, group, profile)
        assert choice.seconds == pytest.approx(times[choice.algorithm])
        assert choice.seconds <= min(times.values()) / 0.95
        assert choice.algorithm == "library" or choice.seconds < 0.95 * times["library"]


@pytest.mark.parametrize("size", [1 << 16, 1 << 20])
def test_the_number_of_segments_is_near_the_best(size):
    profile = equal(7)
    group = profile.group(range(7))
    times = {
        s: links.seconds("all_reduce", "tree", size, group, profile, segments=s)
        for s in (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
    }
    best = links.seconds("all_reduce", "tree", size, group, profile, segments=links.best_segments(size, group, profile))
    assert best <= 1.25 * min(times.values())


def test_the_librarys_bytes_are_the_layouts():
    group = equal(3).group(range(3))
    for op, size in itertools.product(ALGORITHMS, (0, 7, 96)):
        assert links.sent(op, "library", size, group, 1) == layout.sent(op, size, 3)


def counted(profile, made):
    """On a rank: bytes that each collective is counted to send, those that its messages have, and those told."""
    n, rank, held = dist.get_world_size(), dist.get_rank(), []
    axis = Axis("tp", dist.group.WORLD, Counts())
    axis.choices = links.Choices(profile, profile.group(range(n)), rank)
    send, found = dist.batch_isend_irecv, []

    def looked(ops):
        held.extend(op.tensor.numel() * op.tensor.element_size() for op in ops if op.op is dist.isend)
        return send(ops)

    dist.batch_isend_irecv = looked
    try:
        for op, algorithm, elements, dtype in made:
            axis.choices.of = lambda *_, algorithm=algorithm: Choice(algorithm, 0.0, 2)
            whole, part = torch.ones(n * elements, dtype=dtype), torch.ones(elements, dtype=dtype)
            held.clear()
            if op == "all_reduce":
                axis.all_reduce(whole)
            elif op == "all_to_all":
                axis.all_to_all(whole.split(elements), torch.empty_like(whole).split(elements), even=True)
            else:
                getattr(axis, op)(part if op == "all_gather" else whole)
            ((key, tally),) = axis.counts.take().items()
            wide = 2 if dtype == torch.bfloat16 else 1
            told = links.sent(op, algorithm, whole.numel() * whole.element_size(), axis.choices.group, rank, wide)
            found.append((key[1], tally.bytes, sum(held), told))
    finally:
        dist.batch_isend_irecv = send
    return found


@pytest.mark.parametrize(("n", "hosts"), [(3, (0, 1, 2)), (4, (0, 0, 1, 1)), (5, (0, 0, 0, 1, 1))])
def test_what_is_told_is_counted_and_sent(ranks, n, hosts):
    profile = Profile(hosts, A, RATE, A, (RATE,) * (max(hosts) + 1))
    made = [(op, algorithm, 33, dtype) for op in ALGORITHMS for algorithm in ALGORITHMS[op] for dtype in (torch.float64, torch.bfloat16)]  # fmt: skip
    for rank, told in enumerate(ranks.run(n, counted, profile, made)):
        for (op, tally, messages, formula), case in zip(told, made, strict=True):
            assert (op, tally, formula) == (case[0], messages, messages), (rank, case)


def test_a_profile_comes_back_as_it_was_written(tmp_path):
    for profile in PROFILES[:2] + PROFILES[3:]:
        whole = dataclasses.replace(profile, sums=1e9, inside_rate=1e9)
        links.write(tmp_path / "links.json", whole, ["a", "b"])
        assert links.read(tmp_path / "links.json") == whole


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"between": -1.0}, "between is -1.0, and seconds and bytes are 0 or more"),
        ({"inside_rate": 0}, "inside_rate is 0.0, and bytes/s are above 0"),
        ({"rates": [1e6]}, "rates is [1000000.0]: a number above 0 for each of 2 hosts is wanted"),
        ({"rates": [1e6, 0]}, "rates is [1000000.0, 0.0]: a number above 0 for each of 2 hosts is wanted"),
        ({"hosts": [0, 2]}, "hosts is [0, 2], and they are to be numbered from 0 without a gap"),
        ({"inside": "fast"}, "a value of another kind than it should be: could not convert string to float: 'fast'"),
        ({"inside": None}, "a value of another kind than it should be"),
        ({"crowded": [[9, 0.1], [4, 0.2]]}, "crowded has [[9, 0.1], [4, 0.2]]: rising bytes are wanted"),
        ({"library": [{"op": "all_sum", "hosts": [0, 1], "points": [[1, 1]]}]}, "library has all_sum of [[1, 1.0]]"),
    ],
)
def test_numbers_that_no_link_has_are_refused(tmp_path, change, what):
    path = tmp_path / "links.json"
    links.write(path, dataclasses.replace(equal(2), sums=1e9, inside_rate=1e9))
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(OutlastError) as told:
        links.read(path)
    assert what in told.value.what
    assert "measure anew" in told.value.fix
    assert told.value.where == str(path)


def test_a_profile_without_a_number_is_refused(tmp_path):
    path = tmp_path / "links.json"
    path.write_text(json.dumps({"record": "links", "version": 1, "hosts": [0, 1]}))
    with pytest.raises(OutlastError, match="it has no 'inside'"):
        links.read(path)
