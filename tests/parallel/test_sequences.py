"""Sequences shared by a ring and by Ulysses: faults found in others, on the smallest input that shows each, and any packing.

As tests/parallel/test_cases.py: gradients, both norms and the weights after a plain gradient step, against one process.
"""

import random
from dataclasses import replace

import layouts
import numpy as np
import one_step
import pytest
import torch
from one_step import run_of
from test_cases import equal

from outlast import layout
from outlast.config import Model, Parallel, Run, replaced
from outlast.data import IGNORED
from outlast.data.batches import MicroBatch
from outlast.errors import UsageError
from outlast.parallel.inputs import inputs
from outlast.parallel.mesh import Mesh

RING2, RING4, ULYSSES2, ULYSSES4 = {"ring": 2}, {"ring": 4}, {"ulysses": 2}, {"ulysses": 4}
BOTH = {"ring": 2, "ulysses": 2}


def packed(*documents, learned=None, first=0):
    """Sequences of made-up tokens, each of documents of some lengths; of all that is learned, or of some places."""
    length = sum(documents[0])
    draws = [np.random.default_rng(first + i).integers(0, 33, length + 1) for i in range(len(documents))]
    drawn = np.array(draws, dtype=np.int64)
    targets = drawn[:, 1:].copy()
    if learned is not None:
        for row, places in enumerate(learned):
            targets[row, [place for place in range(length) if place not in places]] = IGNORED
    where = np.stack([np.concatenate([np.arange(n) for n in lengths]) for lengths in documents])
    return MicroBatch(np.arange(first, first + len(documents)), drawn[:, :-1].copy(), targets, where, documents)


@pytest.mark.parametrize("layout", [RING2, RING4, ULYSSES2, BOTH], ids=str)
def test_one_learned_token_of_all(ranks, layout):
    """cases: Megatron-LM#7513."""
    equal(ranks, layout, [[packed((8,), learned=[[5]])]])


@pytest.mark.parametrize("layout", [RING2, ULYSSES2, BOTH], ids=str)
def test_a_half_that_is_masked(ranks, layout):
    """cases: Megatron-LM#1764: under Ulysses a whole rank learns nothing."""
    equal(ranks, layout, [[packed((8,), learned=[range(4)])]])


@pytest.mark.parametrize("layout", [RING2, BOTH], ids=str)
def test_a_batch_in_which_nothing_is_learned(ranks, layout):
    """cases: Megatron-LM#1764: zero gradients, finite; and no sequence at all."""
    for work in ([[packed((8,), learned=[[]])]], [[one_step.batch([])]]):
        kept = layouts.put_together(ranks.run(layouts.ranks_of(layout), one_step.on_rank, run_of(layout), work, 1.0))
        assert kept.loss == kept.norm == kept.largest == [0.0]
        assert not any(tensor.any() for name, tensor in kept.tensors.items() if name.startswith("gradient."))


@pytest.mark.parametrize("documents", [(4, 4), (3, 5), (1, 2, 1, 3, 1), (8,)], ids=str)
@pytest.mark.parametrize("layout", [RING2, RING4, ULYSSES2, BOTH, {"ring": 2, "tp": 2, "sp": True}], ids=str)
def test_packed_documents(ranks, layout, documents):
    """cases: Megatron-LM#5243, #1473, #560: rotary positions; axolotl#3608, #4002: five documents in a row."""
    equal(ranks, layout, [[packed(documents)]])


def test_positions_are_those_of_the_document():
    """cases: Megatron-LM#5243."""
    told = []
    for rank in (0, 1):
        _, _, packing = inputs(packed((4, 4)), Mesh(Parallel(ring=2), rank, torch.device("cpu")))
        told.append((packing.positions_BS.tolist(), packing.stream_BR.tolist()))
    assert told == [([[0, 3, 0, 3]], [[0, 3, 4, 7]]), ([[1, 2, 1, 2]], [[1, 2, 5, 6]])]


def test_sequences_cut_otherwise_than_one_another(ranks):
    work = [[packed((8, 4, 4), (1, 15), (16,)), packed((16,), (16,), first=3)]]
    for one in (RING2, RING4, BOTH, {"ring": 2, "tp": 2}):
        equal(ranks, one, work)


@pytest.mark.parametrize(
    ("layout", "heads", "kv"),
    [(ULYSSES4, 4, 2), (ULYSSES4, 4, 1), (ULYSSES2, 6, 2), (BOTH, 4, 1), ({"ulysses": 2, "tp": 2}, 4, 2), ({"ulysses": 2, "tp": 2, "sp": True}, 8, 2)],
    ids=str,
)  # fmt: skip
def test_fewer_key_value_heads_than_ranks(ranks, layout, heads, kv):
    """cases: verl#1226, DeepSpeed#4674, #8291: gradients of the copies are summed."""
    equal(ranks, layout, [[packed((5, 3))]], num_heads=heads, num_kv_heads=kv)


def two_models(layout):
    """Two models of other head counts, both in this process; each one's step."""
    mesh_and_models = [
        (run_of(layout, **shape), one_step.spread(run_of(layout, **shape)))
        for shape in ({"num_heads": 4, "num_kv_heads": 2}, {"num_heads": 6, "num_kv_heads": 6})
    ]
    return [one_step.taken(run, *spread, [[packed((5, 3))]]) for run, spread in mesh_and_models]


def test_two_models_in_one_process(ranks):
    """cases: torchtitan#2574: nothing of one model's heads is kept where another looks for it."""
    alone = two_models({})
    kept = ranks.run(2, two_models, ULYSSES2)
    for i, reference in enumerate(alone):
        both = layouts.put_together([of_rank[i] for of_rank in kept])
        assert max(layouts.furthest(both, layouts.put_together([reference])).values()) <= 1e-12


@pytest.mark.parametrize("layout", [RING2, ULYSSES2, BOTH, {"ring": 2, "tp": 2, "sp": True}], ids=str)
def test_dropout_hangs_on_a_tokens_place_in_its_sequence(ranks, layout):
    """cases: Megatron-LM#1256, #4828."""
    equal(ranks, layout, [[packed((5, 3), (8,))]], dropout=0.5)


def refused(knobs, **shape):
    run = Run(model=replace(Model(num_heads=6, num_kv_heads=3, intermediate_size=24), **shape))
    with pytest.raises(UsageError) as caught:
        layout.check(replaced(run, knobs))
    return str(caught.value)


def test_what_cannot_be_shared_is_refused_by_name():
    """cases: EasyContext#47, DeepSpeed#5177: 7 tokens; verl#1226: 6 heads sharing 3 at 2."""
    told = refused({"data.sequence_length": 7, "parallel.ring": 2})
    assert "cannot share 7 positions among ring=2 ranks" in told
    assert "nearest that divides: 6 or 8" in told
    told = refused({"data.sequence_length": 20, "parallel.ring": 2, "parallel.ulysses": 3, "parallel.tp": 1})
    assert "cannot share 20 positions among ring=2 x ulysses=3 ranks" in told
    assert "nearest that divides: 18 or 24" in told
    told = refused({"data.sequence_length": 8, "parallel.ulysses": 4})
    assert "cannot share 6 attention heads over ulysses=4" in told
    assert "ulysses can be 1, 3, 6; parallel.ring takes any number" in told
    told = refused({"data.sequence_length": 8, "parallel.ulysses": 2})
    assert "cannot share 3 key/value heads over ulysses=2" in told
    assert "2 query heads would be torn apart" in told
    told = refused({"data.sequence_length": 8, "parallel.ulysses": 4, "parallel.tp": 3})
    assert "cannot share 2 attention heads that each rank of tp=3 has over ulysses=4" in told
    assert "nobody shares a sequence" in refused({"parallel.shard_sequence_ranks": True})


SHARED = [
    {"ring": 2}, {"ulysses": 2}, {"ring": 4}, {"ulysses": 4}, {"ring": 2, "ulysses": 2}, {"ring": 2, "tp": 2, "sp": True},
    {"ulysses": 2, "tp": 2}, {"ring": 2, "dp_shard": 2, "shard_sequence_ranks": True}, {"ulysses": 2, "dp_replicate": 2},
]  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_any_packing_under_any_layout(ranks, seed):
    """Random documents, masks and layouts: all of them on the same four ranks, one after the other."""
    draw = random.Random(seed)
    print(f"seed {seed}")
    for layout_of in draw.sample(SHARED, 3):
        data = layout_of.get("dp_shard", 1) * layout_of.get("dp_replicate", 1)
        work = []
        for rank in range(data):
            sequences = []
            for _ in range(draw.randint(1, 3)):
                lengths: list[int] = []
                while (left := 24 - sum(lengths)) > 0:
                    lengths.append(draw.randint(1, left) if draw.random() < 0.5 else min(left, draw.randint(1, 4)))
                sequences.append(tuple(lengths))
            learned = [[place for place in range(24) if draw.random() < 0.7] for _ in sequences]
            work.append([packed(*sequences, learned=learned, first=10 * rank)])
        equal(ranks, layout_of, work, num_kv_heads=draw.choice((1, 2, 4)))
