"""The number of pieces: measured, agreed on, and of no bearing on any bit of a run."""

import json

import layouts
import one_step
import pytest
import torch
from ranks import once

from outlast.comm.pieces import Stream
from outlast.comm.rows import EXACT
from outlast.config import Run, replaced
from outlast.parallel import chosen_pieces
from outlast.parallel.mesh import make

TINY = replaced(
    Run(),
    {
        "model.hidden_size": 64, "model.intermediate_size": 96, "model.num_heads": 4, "model.num_kv_heads": 2, "model.head_dim": 16,
        "model.qkv_bias": True, "data.sequence_length": 128, "train.batch": 3, "train.dtype": "float32", "eval.samples": 5,
        "parallel.tp": 2, "parallel.sp": True,
    },
)  # fmt: skip


def choose(run, slow=()):
    """On a rank: the choice, where some numbers of pieces are told to take long or to change bits."""
    mesh = once(make, run.parallel, one_step.CPU)
    seconds, same = chosen_pieces._seconds, chosen_pieces.same_bits
    times = dict(slow)
    try:
        if times:
            chosen_pieces._seconds = lambda _, stream: times[stream.pieces] * (1 + mesh.rank)
            chosen_pieces.same_bits = lambda _run, stream, _counts, _device: stream.pieces != 8 or mesh.rank == 0
        return chosen_pieces.chosen(run, mesh, held_out=5)
    finally:
        chosen_pieces._seconds, chosen_pieces.same_bits = seconds, same


def test_all_ranks_take_the_fastest_that_changes_no_bit(ranks):
    """8 pieces are the fastest, but rank 1 finds other bits; 4 are next."""
    told = ranks.run(2, choose, TINY, {1: 5.0, 2: 4.0, 4: 2.0, 8: 1.0, 16: 3.0})
    assert told == [4, 4]
    measured = ranks.run(2, choose, TINY)
    assert measured[0] == measured[1]
    assert measured[0] in (1, 2, 4, 8, 16)  # up to eight pieces a rank


def test_what_was_set_is_taken_and_nothing_is_measured_without_a_stream(ranks):
    assert ranks.run(2, choose, replaced(TINY, {"parallel.overlap": 6})) == [6, 6]
    assert ranks.run(2, choose, replaced(TINY, {"parallel.sp": False})) == [0, 0]


def test_passes_of_training_and_of_evaluation():
    """Batches of 3, evaluations of 5 samples: a whole number of micro-batches, and what is left over."""
    assert chosen_pieces.sequences(TINY, held_out=9) == [3, 5]
    assert chosen_pieces.sequences(TINY, held_out=4) == [3, 4]
    assert chosen_pieces.sequences(TINY, held_out=0) == [3]
    assert chosen_pieces.sequences(replaced(TINY, {"train.micro_batch": 2}), held_out=9) == [2, 1]
    # Of two ranks, one has 2 of the 3 sequences and the other 1; which, changes from step to step.
    assert chosen_pieces.sequences(replaced(TINY, {"parallel.dp_shard": 2}), held_out=9) == [2, 1, 3]


def compared(run, pieces):
    """On a rank: whether it finds the same bits; and whether the library sums 704 products alike in all and in 64 rows."""
    axis = once(make, run.parallel, one_step.CPU).axes["tp"]
    a, w = (torch.randn(n, 704, dtype=torch.float64) for n in (2048, 256))
    alike = torch.equal(a @ w.T, torch.cat([part @ w.T for part in a.split(64)]))
    return chosen_pieces.same_bits(run, Stream(axis, pieces, EXACT), [1], one_step.CPU), alike


def test_other_bits_are_found_where_there_are_some(ranks):
    """In float64 MKL sums 704 products in another order where there are 64 rows than where there are 2,048."""
    assert all(same for same, _ in ranks.run(2, compared, TINY, 8))
    wide = {
        "model.hidden_size": 256,
        "model.intermediate_size": 1408,
        "data.sequence_length": 2048,
        "train.dtype": "float64",
    }
    told = ranks.run(2, compared, replaced(TINY, wide), 32)
    if told[0][1]:
        pytest.skip("this machine's library sums alike")
    assert not any(same for same, _ in told)


@pytest.mark.parametrize("again", [False, True], ids=["kept", "gathered again"])
def test_a_run_has_the_same_bits_in_any_number_of_pieces(tmp_path, ranks, again):
    """Loss, gradients, weights and moments of five steps in float32, cut after step 2 and gone on with in others."""
    layout = {"tp": 2, "sp": True, "sp_regather": again}
    knobs = {"train__dtype": "float32", "data__sequence_length": 64}

    def train(name, overlap, **more):
        words = layouts.words(tmp_path, layout | {"overlap": overlap}, name, **knobs, **more)
        return layouts.put_together(ranks.run(2, layouts.on_rank, words))

    one = train("one", 1)
    for overlap in (2, 8, 0):
        train(f"cut{overlap}", overlap, train__stop_at=2)
        told = train(f"cut{overlap}", 1 if overlap == 8 else 4)
        assert told.loss == one.loss[2:]
        assert all(torch.equal(tensor, one.tensors[name]) for name, tensor in told.tensors.items())
    start = json.loads((tmp_path / "cut0" / "journal.jsonl").read_text().splitlines()[0])
    assert start["overlap"] in (1, 2, 4, 8, 16)
    assert "overlap = 4" in (tmp_path / "cut0" / "run.toml").read_text()


@pytest.mark.parametrize("code", ["bf16", "int8"])
@pytest.mark.parametrize("layout", [{"tp": 2}, {"tp": 2, "sp": True, "overlap": 4}, {"tp": 4, "sp": True}], ids=str)
def test_rounded_activations_train_close_to_exact_ones(tmp_path, ranks, layout, code):
    """Five steps by plain gradient descent: losses within 0.1 %, norms within 1 %, held-out losses within 0.1 %.

    The ranks still agree on everything they should have alike: it is checked when their parts are put together.
    """
    knobs = {"train__dtype": "float32", "optim__lr": 0.1}
    exact = layouts.trained(layouts.words(tmp_path, {}, "exact", **knobs), "sgd")
    words = layouts.words(tmp_path, layout | {"tp_compress": code}, "rounded", **knobs)
    near = layouts.put_together(ranks.run(layouts.ranks_of(layout), layouts.on_rank, words, "sgd"))
    assert near.loss == pytest.approx(exact.loss, rel=1e-3)
    assert near.held_out == pytest.approx(exact.held_out, rel=1e-3)
    assert near.norm == pytest.approx(exact.norm, rel=1e-2)
    assert near.loss != exact.loss
