"""The order of samples: a permutation an epoch, the same whatever the steps and ranks."""

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast import layout
from outlast.data.order import Order, permuted, shares


@given(st.integers(1, 700), st.text(max_size=5))
def test_permuted_is_a_permutation(size, key):
    assert sorted(permuted(i, size, key) for i in range(size)) == list(range(size))


def test_permuted_looks_shuffled():
    # Of a uniform shuffle of n, neighbours stay neighbours about twice; and the mean shift is n/3.
    n = 5000
    order = [permuted(i, n, "7/0/0") for i in range(n)]
    assert sum(b - a == 1 for a, b in itertools.pairwise(order)) < 10
    assert sum(abs(i - at) for i, at in enumerate(order)) / n == pytest.approx(n / 3, rel=0.05)
    assert order != [permuted(i, n, "7/0/1") for i in range(n)]


def test_permuted_is_uniform_over_keys():
    # 6,000 shuffles of 4: each of the 24 orders 250 times, give or take five deviations of sqrt(250).
    counts = Counter(tuple(permuted(i, 4, f"{key}/0/0") for i in range(4)) for key in range(6000))
    assert len(counts) == 24
    assert max(abs(count - 250) for count in counts.values()) < 5 * 250**0.5


@given(
    size=st.integers(1, 60),
    seed=st.integers(0, 2**31),
    history=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 8)), min_size=1, max_size=40),
)
def test_any_history_takes_every_sample_once_an_epoch(size, seed, history):
    """Steps of any batch size over any number of ranks, changing at will, straddling epochs as they come."""
    order, position, taken = Order((size,), (1,), seed), 0, []
    for batch, ranks in history:
        for rank in range(ranks):
            taken += [(p, order.at(p)) for p in layout.share(position, position + batch, ranks, rank)]
        position += batch
    assert [p for p, _ in taken] == list(range(position))
    for epoch in range(position // size):
        assert sorted(at.sample for _, at in taken[epoch * size : (epoch + 1) * size]) == list(range(size))
    assert all(at.epoch == p // size for p, at in taken)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=4), st.data())
def test_mixtures_keep_their_shares_and_their_epochs(sizes, data):
    weights = tuple(data.draw(st.lists(st.floats(0.05, 10), min_size=len(sizes), max_size=len(sizes))))
    order = Order(tuple(sizes), shares(weights), 3)
    total = min(1500, 3 * sum(order.shares))
    places = [order.at(p) for p in range(total)]
    for group, size in enumerate(sizes):
        mine = [at for at in places if at.group == group]
        # Never further than one sample a group from its share, at any time.
        exact = total * order.shares[group] / sum(order.shares)
        assert abs(len(mine) - exact) <= len(sizes)
        for epoch in range(len(mine) // size):
            assert sorted(at.sample for at in mine[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_shares():
    assert shares((0.7, 0.3)) == (7, 3)
    assert shares((1, 1, 2)) == (1, 1, 2)
    assert shares((5.0,)) == (1,)
    assert shares((1000, 0.001)) == (1000, 1)


def test_seed_and_epoch_shuffle_anew_and_nothing_else_does():
    first = [Order((20,), (1,), 0).at(p).sample for p in range(40)]
    assert first[:20] != first[20:]
    assert first == [Order((20,), (1,), 0).at(p).sample for p in range(40)]
    assert first != [Order((20,), (1,), 1).at(p).sample for p in range(40)]
