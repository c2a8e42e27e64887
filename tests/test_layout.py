"""The rank grid and the shares of a batch."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast import layout
from outlast.config import Model, Parallel
from outlast.errors import UsageError


def test_neighbours_on_the_grid():
    grid = Parallel(dp_replicate=2, dp_shard=3, tp=2)
    assert [layout.coordinates(grid, rank) for rank in (0, 1, 2, 11)] == [
        {"dp_replicate": 0, "dp_shard": 0, "tp": 0},
        {"dp_replicate": 0, "dp_shard": 0, "tp": 1},
        {"dp_replicate": 0, "dp_shard": 1, "tp": 0},
        {"dp_replicate": 1, "dp_shard": 2, "tp": 1},
    ]


@given(st.integers(0, 100), st.integers(0, 64), st.integers(1, 9))
def test_shares_cover_once_and_evenly(first, count, ranks):
    parts = [layout.share(first, first + count, ranks, rank) for rank in range(ranks)]
    assert [p for part in parts for p in part] == list(range(first, first + count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_passes():
    assert layout.passes(64, 8, 6) == 2  # 11 sequences on the busiest of 6 ranks
    assert layout.passes(8, 8, 1) == 1
    assert layout.passes(9, 8, 1) == 2


def test_what_does_not_divide_is_refused_with_what_does():
    with pytest.raises(UsageError, match="cannot split 12 attention heads over tp=5") as caught:
        layout.check(Parallel(tp=5), replace(Model(), num_heads=12, num_kv_heads=12), 5)
    assert "1, 2, 3, 4, 6, 12" in caught.value.fix
    assert caught.value.key == "parallel.tp"
    with pytest.raises(UsageError, match="for 2 ranks, and this run has 1"):
        layout.check(Parallel(tp=2), Model(), 1)
    layout.check(Parallel(), Model(), 1)
