"""Collectives against sums worked out by hand, and their counts and bytes against the formulas' values in numbers."""

import os
import signal

import pytest
import torch
import torch.distributed as dist
from ranks import RankError

from outlast.comm.collectives import Axis, Counts, is_peer_loss


def axis_of(counts=None):
    return Axis("tp", dist.group.WORLD, counts or Counts())


def each(ranks, dtype, shape):
    """What each rank has: other numbers on each, not all exact in a sum."""
    draw = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) * 10**rank for rank in range(ranks)]


def sums(dtype):
    n, rank = dist.get_world_size(), dist.get_rank()
    axis, having = axis_of(), each(n, dtype, (2 * n, 3))
    mine = having[rank].clone()
    reduced, largest = axis.all_reduce(mine), axis.all_reduce(having[rank].clone(), largest=True)
    scattered = axis.reduce_scatter(having[rank])
    out = torch.full((2, 3), 7.0, dtype=dtype)
    into = axis.reduce_scatter(having[rank].T.contiguous().T, out)  # not contiguous
    gathered = axis.all_gather(having[rank][:1])
    whole = torch.empty(2 * n * n, 1, dtype=dtype)
    filled = axis.all_gather(having[rank][:, 1:2], whole)  # not contiguous
    return mine is reduced and into is out and filled is whole, largest, scattered, into, gathered, reduced, filled


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_sums_and_gathers(ranks, n, dtype):
    having = each(n, dtype, (2 * n, 3))
    exact = torch.stack([one.double() for one in having]).sum(0)
    in_order = having[0].float() if dtype == torch.bfloat16 else having[0].clone()
    for one in having[1:]:
        in_order = in_order + one.to(in_order.dtype)
    told = ranks.run(n, sums, dtype)
    for rank, (in_place, largest, scattered, into, gathered, reduced, filled) in enumerate(told):
        assert in_place
        assert torch.equal(filled, torch.cat([one[:, 1:2] for one in having]))
        assert torch.equal(largest, torch.stack(having).amax(0))
        assert torch.equal(gathered, torch.cat([one[:1] for one in having]))
        stretch = slice(2 * rank, 2 * rank + 2)
        # In rank order, so the same bits whoever sums; 16-bit types are rounded once, at the end.
        assert torch.equal(scattered, in_order[stretch].to(dtype))
        assert torch.equal(into, scattered)
        near = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
        assert ((reduced.double() - exact).abs() <= near * sum(one.double().abs() for one in having)).all()
        assert torch.equal(reduced, told[0][5])


def sixteen_bits():
    mine = torch.tensor([[256.0, 1.0, 1.0][dist.get_rank()]] * 3, dtype=torch.bfloat16)
    return axis_of().reduce_scatter(mine).item()


def test_sixteen_bit_sums_are_taken_in_float32(ranks):
    """256 + 1 + 1 is 256 where every sum is rounded to eight bits, and 258 where the last alone is."""
    assert (torch.tensor(256.0, dtype=torch.bfloat16) + 1 + 1).item() == 256
    assert ranks.run(3, sixteen_bits) == [258.0] * 3


SIZES = [[2, 0, 3], [1, 4, 0], [0, 0, 5]]
"""Elements that each rank sends to each."""


def uneven():
    counts, rank = Counts(), dist.get_rank()
    axis = axis_of(counts)
    parts = [torch.arange(n, dtype=torch.float64) + 100 * rank + 10 * to for to, n in enumerate(SIZES[rank])]
    into = [torch.empty(SIZES[frm][rank], dtype=torch.float64) for frm in range(3)]
    into[2] = into[2].view(1, -1) if rank == 2 else into[2]  # any shape
    axis.all_to_all(parts, into)
    ((key, tally),) = counts.take().items()
    return [one.flatten().tolist() for one in into], key, tally.calls, tally.bytes


def test_uneven_exchange(ranks):
    told = ranks.run(3, uneven)
    for rank, (got, key, calls, size) in enumerate(told):
        wanted = [[100.0 * frm + 10 * rank + i for i in range(SIZES[frm][rank])] for frm in range(3)]
        assert got == wanted
        assert (key, calls) == (("tp", "all_to_all"), 1)
        assert size == [24, 8, 0][rank]  # 8 bytes an element, of those for others: 3, 1 and 0


def counted():
    counts = Counts()
    axis = axis_of(counts)
    twelve = torch.zeros(12, dtype=torch.float64)
    axis.all_reduce(twelve)
    axis.all_reduce(torch.zeros(12, dtype=torch.bfloat16))
    axis.all_gather(torch.zeros(4))
    axis.reduce_scatter(twelve)
    axis.reduce_scatter(twelve)
    axis.gather_objects("not counted")
    taken = counts.take()
    assert all(tally.seconds > 0 for tally in taken.values())
    assert counts.take() == {}
    axis.all_reduce(twelve)
    return [{key: (tally.calls, tally.bytes) for key, tally in one.items()} for one in (taken, counts.take())]


def test_counts_and_bytes_in_numbers(ranks):
    """On 3 ranks, of 96 bytes: an all-reduce sends 2 x 96 x 2/3 = 128, a reduce-scatter 64; 24 bytes: 32; a gather of
    three times 16 bytes: 32."""
    first = {("tp", "all_reduce"): (2, 128 + 32), ("tp", "all_gather"): (1, 32), ("tp", "reduce_scatter"): (2, 128)}
    assert ranks.run(3, counted) == [[first, {("tp", "all_reduce"): (1, 128)}]] * 3


def shifted(by):
    """Two rounds begun before the first is waited for; the second carries less, and an empty tensor."""
    counts, rank, n = Counts(), dist.get_rank(), dist.get_world_size()
    axis, back = axis_of(counts), (rank - by) % n
    first = [torch.full((3, rank + 1), float(rank), dtype=torch.float64), torch.full((2,), rank, dtype=torch.bfloat16)]
    got = [torch.empty(3, back + 1, dtype=torch.float64), torch.empty(2, dtype=torch.bfloat16)]
    second, then = [torch.arange(4) + 10 * rank, torch.empty(0)], [torch.empty(4, dtype=torch.int64), torch.empty(0)]
    one, two = axis.shift(first, got, by), axis.shift(second, then, by)
    two.wait()
    one.wait()
    one.wait()
    nothing = axis.shift([torch.empty(0)], [torch.empty(0)], by)
    nothing.wait()
    ((key, tally),) = counts.take().items()
    assert tally.seconds > 0
    assert [*got[0].flatten().tolist(), *got[1].tolist()] == [float(back)] * (3 * (back + 1) + 2)
    assert then[0].tolist() == [10 * back, 10 * back + 1, 10 * back + 2, 10 * back + 3]
    return key, tally.calls, tally.bytes


@pytest.mark.parametrize(("n", "by"), [(2, 1), (3, 1), (3, -1), (4, 2), (4, 3)])
def test_shifts_overlap_and_are_counted(ranks, n, by):
    """3 (r + 1) numbers of 8 bytes, 2 of 2, then 4 of 8; three calls, of which the last carries nothing."""
    assert ranks.run(n, shifted, by) == [(("tp", "shift"), 3, 24 * (r + 1) + 4 + 32) for r in range(n)]


def objects():
    return axis_of().gather_objects({"rank": dist.get_rank()})


def test_objects_come_in_rank_order(ranks):
    assert ranks.run(3, objects) == [[{"rank": 0}, {"rank": 1}, {"rank": 2}]] * 3


def left_alone(told):
    """Rank 1 is killed while the others wait for it; they write what they took the error for."""
    axis, rank = axis_of(), dist.get_rank()
    axis.all_reduce(torch.zeros(1))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for _ in range(100):
            axis.all_gather(torch.zeros(1000))
    except RuntimeError as error:
        try:
            raise OSError("could not go on") from error
        except OSError as outer:
            (told / f"{rank}").write_text(f"{is_peer_loss(error)} {is_peer_loss(outer)}")
        raise


def test_a_killed_peer_is_known_as_such(ranks, tmp_path):
    with pytest.raises(RankError, match="SIGKILL"):
        ranks.run(3, left_alone, tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0": "True True", "2": "True True"}


def test_what_is_no_peers_loss():
    assert not is_peer_loss(None)
    assert not is_peer_loss(RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"))
    assert not is_peer_loss(ConnectionResetError("connection reset by peer"))  # of a file system or a proxy, say
    assert is_peer_loss(RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer [127.0.0.1]:1"))
