"""The rank grid and the shares of a batch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast import config, layout
from outlast.config import Parallel, Run
from outlast.errors import UsageError


def test_neighbours_on_the_grid():
    grid = Parallel(dp_replicate=2, dp_shard=3, ring=2, ulysses=2, tp=2)
    told = [tuple(layout.coordinates(grid, rank)[axis] for axis in layout.AXES) for rank in (0, 1, 2, 4, 8, 47)]
    assert told == [
        (0, 0, 0, 0, 0),
        (0, 0, 0, 0, 1),
        (0, 0, 0, 1, 0),
        (0, 0, 1, 0, 0),
        (0, 1, 0, 0, 0),
        (1, 2, 1, 1, 1),
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


def refused(**knobs):
    run = config.replaced(Run(), {key.replace("__", "."): value for key, value in knobs.items()})
    with pytest.raises(UsageError) as caught:
        layout.check(run)
    return caught.value


def test_what_does_not_divide_is_refused_with_what_does():
    error = refused(parallel__tp=5, model__num_heads=12, model__num_kv_heads=12, model__intermediate_size=720)
    assert error.what == "cannot split 12 attention heads over tp=5"
    assert error.fix == "heads per rank must be whole: tp can be 1, 2, 3, 4, 6, 12"
    assert error.key == "parallel.tp"
    error = refused(parallel__tp=4, model__intermediate_size=702)
    assert error.what == "cannot split 702 feed-forward channels over tp=4"
    assert error.fix == "channels per rank must be whole: tp can be 1, 2"
    error = refused(parallel__tp=4, model__vocab_size=3)
    assert error.what == "cannot split a vocabulary of 3 over tp=4"
    error = refused(parallel__tp=2, parallel__sp=True, data__sequence_length=33)
    assert error.what == "cannot share 33 positions among tp=2 ranks under sequence parallelism"
    assert "32 or 34" in error.fix
    assert refused(parallel__sp_regather=True).key == "parallel.sp_regather"


def test_what_does_not_travel_is_neither_cut_nor_rounded():
    error = refused(parallel__tp=2, parallel__overlap=4)
    assert (
        error.what
        == "parallel.overlap is 4, and parallel.sp is not on: nothing is gathered for products to overlap with"
    )
    assert error.key == "parallel.overlap"
    layout.check(config.replaced(Run(), {"parallel.overlap": 1}))
    error = refused(parallel__tp_compress="int8")
    assert error.what == "parallel.tp_compress is int8, and parallel.tp is 1: no activations travel"
    error = refused(parallel__tp=2, parallel__tp_compress="bf16", train__dtype="bfloat16")
    assert error.what == "parallel.tp_compress is bf16, and activations are bfloat16 already"
    assert error.key == "parallel.tp_compress"
    layout.check(config.replaced(Run(), {"parallel.tp": 2, "parallel.tp_compress": "int8", "train.dtype": "bfloat16"}))


def test_a_key_value_group_is_never_torn():
    """cases: verl#1226, DeepSpeed#4674, torchtitan#2574."""
    error = refused(parallel__tp=2, model__num_heads=6, model__num_kv_heads=3)
    assert error.what == "cannot split 3 key/value heads over tp=2"
    assert "torn apart unevenly: tp can be 1, 3, 6" not in error.fix  # 704 channels are not thirds
    assert error.fix.endswith("torn apart unevenly: tp can be 1")
    assert error.key == "parallel.tp"
    for heads, kv, tp in ((4, 2, 4), (4, 1, 4), (4, 1, 2), (6, 3, 3)):
        knobs = {"model.num_heads": heads, "model.num_kv_heads": kv, "model.intermediate_size": 12, "parallel.tp": tp}
        layout.check(config.replaced(Run(), knobs))


def test_the_ranks_started_must_be_those_of_the_layout():
    with pytest.raises(UsageError, match=r"tp=2 is for 2 ranks, and 1 were started") as caught:
        layout.check(config.replaced(Run(), {"parallel.tp": 2}), 1)
    assert "torchrun --nproc-per-node 2" in caught.value.fix
    layout.check(Run(), 1)
    layout.check(config.replaced(Run(), {"parallel.tp": 2}))
