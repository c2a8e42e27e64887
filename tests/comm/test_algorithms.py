"""Every algorithm of every collective against what it should give, worked out from what all ranks bring."""

import itertools
import random

import pytest
import torch
import torch.distributed as dist

from outlast import schedules
from outlast.comm import algorithms

SEED = 7


def hosts_of(n):
    """Where n ranks may be: on one host, on one each, in pairs, unevenly, and one in turn with the other."""
    return sorted({(0,) * n, tuple(range(n)), tuple(r // 2 for r in range(n)), (0,) * (n - 1) + (1,), tuple(r % 2 for r in range(n))})  # fmt: skip


def brought(n, elements, dtype):
    """What each rank brings: other numbers on each; whole ones for whole types."""
    draw = torch.Generator().manual_seed(SEED)
    if not dtype.is_floating_point:
        return [torch.randint(-1000, 1000, (elements,), generator=draw, dtype=dtype) for _ in range(n)]
    return [torch.randn(elements, generator=draw, dtype=torch.float64).to(dtype) * 3**r for r in range(n)]


def grouped(hosts, seed):
    """The ranks in any order that keeps those of a host together."""
    draw = random.Random(seed)
    order = sorted(range(len(hosts)), key=lambda r: (hosts[r], r))
    if draw.random() < 0.5:
        order.reverse()
    return schedules.Group(hosts, tuple(order))


def made(op, algorithm, elements, dtype, hosts, segments):
    """On a rank: one collective, by its schedule alone."""
    n, rank = dist.get_world_size(), dist.get_rank()
    mine = brought(n, elements * (n if op in ("reduce_scatter", "all_to_all") else 1), dtype)[rank]
    whole = elements * (1 if op == "all_reduce" else n) * mine.element_size()
    plan = schedules.schedule(op, algorithm, whole, grouped(hosts, SEED), segments)
    if op == "all_to_all":
        into = [torch.empty(elements, dtype=dtype) for _ in range(n)]
        algorithms.exchange(mine.split(elements) if elements else [mine] * n, into, plan, rank, dist.group.WORLD)
        return torch.cat(into)
    if op == "all_gather":
        flat = torch.empty(n * elements, dtype=dtype)
        flat[rank * elements : (rank + 1) * elements] = mine
    else:
        flat = mine.clone()
    algorithms.work(flat, plan, rank, dist.group.WORLD)
    return flat[rank * elements : (rank + 1) * elements] if op == "reduce_scatter" else flat


def every(cases):
    """On a rank: all cases, one after the other."""
    return [made(*case) for case in cases]


def tolerance(dtype):
    return {torch.float64: 1e-15, torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}.get(dtype, 0)


def check(n, case, told):
    op, _, elements, dtype, *_ = case
    having = brought(n, elements * (n if op in ("reduce_scatter", "all_to_all") else 1), dtype)
    if op == "all_gather":
        assert all(torch.equal(one, torch.cat(having)) for one in told), case
    elif op == "all_to_all":
        for rank, one in enumerate(told):
            assert torch.equal(one, torch.cat([h[rank * elements : (rank + 1) * elements] for h in having])), case
    else:
        exact = torch.stack([one.to(torch.float64) for one in having]).sum(0)
        near = torch.stack([one.to(torch.float64).abs() for one in having]).sum(0)
        # A sum of n terms in float32 or 64 is off by n - 1 roundings at most; 16-bit ones are rounded once, of the sum.
        most = exact.abs() * tolerance(dtype) + 1e-6 * near if dtype.itemsize == 2 else near * n * tolerance(dtype)
        for rank, one in enumerate(told):
            span = slice(rank * elements, (rank + 1) * elements) if op == "reduce_scatter" else slice(None)
            assert ((one.to(torch.float64) - exact[span]).abs() <= most[span]).all(), case
            if op == "all_reduce":
                assert torch.equal(one, told[0]), case


@pytest.mark.parametrize("n", range(2, 9))
def test_every_algorithm_of_every_collective(ranks, n):
    """All types, hosts and sizes there are, those that do not divide and 0 among them; drawn, where they are too many."""
    draw = random.Random(SEED + n)
    types = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32]
    cases = [
        (op, algorithm, elements, dtype, hosts, draw.choice((1, 2, 5)))
        for op, those in schedules.ALGORITHMS.items()
        for algorithm, elements in itertools.product(those, (0, 1, 7, 64, 1001))
        for dtype, hosts in draw.sample(list(itertools.product(types, hosts_of(n))), 3)
    ]
    told = ranks.run(n, every, cases)
    for i, case in enumerate(cases):
        check(n, case, [one[i] for one in told])


def sixteen(cases):
    """256 on rank 0, 1 on the others."""
    n, rank = dist.get_world_size(), dist.get_rank()
    sums = []
    for algorithm, hosts in cases:
        flat = torch.full((n,), 1.0 if rank else 256.0, dtype=torch.bfloat16)
        plan = schedules.schedule("all_reduce", algorithm, 2 * n, grouped(hosts, SEED), 2)
        algorithms.work(flat, plan, rank, dist.group.WORLD)
        sums.append(set(flat.tolist()))
    return sums


@pytest.mark.parametrize("n", [3, 5])
def test_sixteen_bit_sums_are_taken_in_float32(ranks, n):
    """256 + 1 + 1 is 256 where every sum is rounded to eight bits."""
    cases = list(itertools.product(schedules.ALGORITHMS["all_reduce"], hosts_of(n)))
    assert ranks.run(n, sixteen, cases) == [[{255.0 + n}] * len(cases)] * n
