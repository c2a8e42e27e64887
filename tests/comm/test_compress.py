"""Sums sent in fewer bytes, worked out by hand on a few numbers in float64, and with error feedback over several turns."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import once

from outlast.comm import compress
from outlast.config import Parallel
from outlast.parallel import mesh

CPU = torch.device("cpu")


def f64(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def axis_of(n):
    grid = once(mesh.make, Parallel(dp_replicate=n), CPU)
    grid.counts.take()
    return grid.axes["dp_replicate"], grid.counts


def test_bits_are_packed_the_first_lowest():
    bits = torch.tensor([1, 0, 1, 1, 0, 0, 0, 0, 0, 1], dtype=torch.bool)
    assert compress.packed(bits).tolist() == [1 + 4 + 8, 2]
    assert compress.packed(bits[:0]).tolist() == []


@given(st.lists(st.booleans(), max_size=40))
def test_packed_bits_come_back(given_bits):
    bits = torch.tensor(given_bits, dtype=torch.bool)
    told = compress.packed(bits)
    assert len(told) == -(-len(bits) // 8)
    assert (compress.unpacked(told, len(bits), torch.float32) == 1).tolist() == given_bits


def test_the_largest_by_hand():
    x = f64(1, -3, 2, 3, -0.0, -2)
    assert compress.largest(x, 1).tolist() == [1]  # of -3 and 3 the first
    assert compress.largest(x, 2).tolist() == [1, 3]
    assert compress.largest(x, 3).tolist() == [1, 2, 3]
    assert compress.largest(x, 6).tolist() == [0, 1, 2, 3, 4, 5]
    assert compress.largest(x, 0).tolist() == []
    assert compress.largest(f64(1, math.nan, 5, -math.inf), 2).tolist() == [1, 3]
    assert compress.largest(f64(math.nan, math.nan, math.nan), 2).tolist() == [0, 1]


@given(st.lists(st.integers(-4, 4), min_size=1, max_size=30), st.data())
def test_the_largest_are_the_first_of_a_stable_sort(numbers, data):
    count = data.draw(st.integers(0, len(numbers)))
    expected = sorted(sorted(range(len(numbers)), key=lambda i: -abs(numbers[i]))[:count])
    assert compress.largest(f64(*numbers), count).tolist() == expected


def test_signs_by_hand():
    # |1| |-2| |3| is 2 on average, -0.0 counts as not below zero; 4 + 0: scale 2; of nothing, 0.
    pieces = [f64(1, -2, 3), f64(-4, -0.0).view(2, 1), torch.empty(0, 2, dtype=torch.float64)]
    told = compress.encoded(pieces)
    assert len(told) == 3 * 8 + 1
    assert told[-1] == 0b10101
    assert told[:24].clone().view(torch.float64).tolist() == [2, 2, 0]
    assert [piece.tolist() for piece in compress.decoded(told, pieces)] == [[2, -2, 2], [[-2], [2]], []]


def rounded(dtype):
    axis, counts = axis_of(2)
    # 1 + 2^-9 is half way between two bfloat16 values and becomes 1; 3 and 2^-8 sum to what rounds to 3.
    x = torch.tensor([[1 + 2**-9, 3.0, -7.0], [0.0, 2**-8, 0.5]][axis.rank], dtype=dtype)
    compress.sum_rounded(x, axis)
    return x, {op: (one.calls, one.bytes) for (_, op), one in counts.take().items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_in_16_bits_by_hand(ranks, dtype):
    for x, sent in ranks.run(2, rounded, dtype):
        assert x.tolist() == [1, 3, -6.5]
        assert x.dtype == dtype
        # 3 numbers filled up to 4, 2 bytes each: half of 8 there and half of 8 back; an all-reduce sends 12 or 24.
        assert sent == {"reduce_scatter": (1, 4), "all_gather": (1, 4)}


def of_three_largest():
    axis, counts = axis_of(3)
    values = [
        [f64(1, -5, 2, 0), f64(0.5, 0.25).view(2, 1)],
        [f64(3, 1, -2, 0), f64(0, -4).view(2, 1)],
        [f64(0, 7, 0, 6), f64(0, 0).view(2, 1)],
    ][axis.rank]
    sums = compress.sum_largest(values, 0.25, axis)
    return [x.tolist() for x in sums], [x.tolist() for x in values], {k: vars(v) for k, v in counts.take().items()}


def test_sums_of_the_largest_by_hand(ranks):
    # A quarter of 4 is 1, of 2 rounded up 1: -5 and 0.5; 3 and -4; 7 and the first of two zeros.
    left = [[[1, 0, 2, 0], [[0], [0.25]]], [[0, 1, -2, 0], [[0], [0]]], [[0, 0, 0, 6], [[0], [0]]]]
    for (sums, values, sent), expected in zip(ranks.run(3, of_three_largest), left, strict=True):
        assert sums == [[3, 2, 0, 0], [[0.5], [-4]]]
        assert values == expected
        call = sent["dp_replicate", "all_gather"]
        assert (call["calls"], call["bytes"]) == (1, 2 * 2 * (4 + 8))  # two numbers and their places, to two others


def of_two_signs():
    axis, counts = axis_of(2)
    values = [[f64(1, -3, 8), f64(5)], [f64(3, 3, -2), f64(-1)]][axis.rank]
    owed = [torch.zeros(3, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)]
    mine = [torch.zeros(2 - axis.rank, dtype=torch.float64), torch.zeros(1 - axis.rank, dtype=torch.float64)]
    compress.mean_of_signs(values, owed, mine, axis)
    told = [[x.tolist() for x in some] for some in (values, owed, mine)]
    return told, {op: (one.calls, one.bytes) for (_, op), one in counts.take().items()}


def test_means_of_signs_by_hand(ranks):
    # The first owns two rows of three and the one of one. Of these rank 0 says 2 -2 and 5, rank 1 3 3 and -1; of the
    # third 8 and -2. Means: 2.5 0.5, 2; 3. As signs: scale 1.5 both above zero, 2; 3.
    (one, sent), (other, sent_by_other) = ranks.run(2, of_two_signs)
    assert one == [[[1.5, 1.5, 3], [2]], [[-1, -1, 0], [0]], [[1, -1], [0]]]
    assert other == [[[1.5, 1.5, 3], [2]], [[0, 0, 0], [0]], [[0], []]]
    # A scale of 8 bytes for each of two tensors and a byte of signs, to the other; and of the mean to the other.
    assert sent == sent_by_other == {"all_to_all": (1, 17), "all_gather": (1, 17)}


def fed_back(way, turns):
    """Values of many turns, and what became of them: all integers, so that sums are exact."""
    axis, _ = axis_of(3)
    draw = torch.Generator().manual_seed(axis.rank)
    shapes = [(7, 3), (2, 5), (11,)]
    owed = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
    rows = [compress.layout.chunk(shape[0], 3, axis.rank) for shape in shapes]
    mine = [owe[r.start : r.stop].clone() for owe, r in zip(owed, rows, strict=True)]
    given = [torch.zeros_like(owe) for owe in owed]
    got = [torch.zeros_like(owe) for owe in owed]
    for _ in range(turns):
        values = [torch.randint(-1000, 1000, shape, generator=draw).double() for shape in shapes]
        for total, value in zip(given, values, strict=True):
            total.add_(value)
        if way == "topk":
            for owe, value in zip(owed, values, strict=True):
                owe.add_(value)
            values = compress.sum_largest(owed, 0.2, axis)
        else:
            compress.mean_of_signs(values, owed, mine, axis)
        for total, value in zip(got, values, strict=True):
            total.add_(value)
    return given, got, owed, mine, rows


@pytest.mark.parametrize("way", ["topk", "onebit"])
def test_what_came_and_what_is_owed_is_what_was_given(ranks, way):
    told = ranks.run(3, fed_back, way, 20)
    for i in range(3):
        given, owed = (sum(one[what][i] for one in told) for what in (0, 2))
        for one in told[1:]:
            assert torch.equal(one[1][i], told[0][1][i])  # all end with the same bits
        if way == "topk":
            assert torch.equal(told[0][1][i] + owed, given)  # exactly
        else:
            of_owners = torch.cat([one[3][i] for one in told])
            torch.testing.assert_close(told[0][1][i] + owed / 3 + of_owners, given / 3, rtol=0, atol=1e-9)
        assert owed.abs().max() > 0


def ended_by_no_number():
    axis, _ = axis_of(2)
    sums = compress.sum_largest([f64(*([math.nan] * 4 if axis.rank else [1, 2, 3, 4]))], 0.5, axis)
    return sums[0].isnan().tolist()


def test_no_numbers_are_sent_first_and_reach_all(ranks):
    assert ranks.run(2, ended_by_no_number) == [[True, True, False, False]] * 2
