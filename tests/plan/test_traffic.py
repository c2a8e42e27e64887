"""Bytes sent, worked out by hand on small shapes, and against what ranks count."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import once

from outlast import layout
from outlast.config import Run, replaced
from outlast.data import IGNORED
from outlast.data.batches import MicroBatch
from outlast.links import Library, Profile, write
from outlast.model import loss
from outlast.parallel import build, links, mesh
from outlast.parallel.gradients import complete
from outlast.parallel.inputs import inputs
from outlast.parallel.matrices import on_whole
from outlast.plan import memory, traffic
from outlast.plan.traffic import Traffic

TINY = replaced(
    Run(),
    {
        "data.sequence_length": 4, "model.vocab_size": 10, "model.hidden_size": 4, "model.intermediate_size": 6,
        "model.num_layers": 2, "model.num_heads": 2, "model.num_kv_heads": 2, "model.head_dim": 3, "train.dtype": "float32",
    },
)  # fmt: skip


def run_of(**knobs):
    """The tiny run with other knobs, by their names: parallel's, then the model's."""
    places = {"dtype": "train.dtype", "optimizer": "optim.name", "length": "data.sequence_length"}
    axes = ("tp", "sp", "sp_regather", "dp_shard", "dp_replicate", "links")
    return replaced(
        TINY, {f"parallel.{k}" if k in axes else places.get(k, f"model.{k}"): value for k, value in knobs.items()}
    )


# Small sums of all ranks: 16 bytes (learned, fed), 8 (norm), 8 (loss), 8 (who asks to leave); of two ranks each sends
# 2 M (2 - 1) / 2 = M.
WORLD_OF_2 = {("world", "all_reduce"): Traffic(4, 48)}


def test_tensor_parallel_by_hand():
    # 3 sequences x 4 tokens x 4 channels x 4 bytes = 192; an all-reduce over two sends 2 x 192 / 2 = 192.
    # Embedding 1, blocks 2 x (2 forward + 2 backward), loss 1: 10 of them. Query and key norms of 3: 2 x 6 x 4 = 48
    # bytes more. The loss: 5 learned tokens x 2 numbers x 4 bytes to the one other rank.
    run = run_of(tp=2, qk_norm=True)
    assert traffic.step(run, [3], [5]) == WORLD_OF_2 | {
        ("tp", "all_reduce"): Traffic(11, 10 * 192 + 48),
        ("tp", "all_gather"): Traffic(1, 40),
    }
    # An evaluation sums the loss and the learned, 16 bytes; embedding 1, blocks 2 x 2.
    assert traffic.evaluation(run, [3], [5]) == {
        ("world", "all_reduce"): Traffic(1, 16),
        ("tp", "all_reduce"): Traffic(5, 5 * 192),
        ("tp", "all_gather"): Traffic(1, 40),
    }


def test_sequence_parallel_by_hand():
    # Halves of what was 192: 96 each. Forward gathers before 2 x 2 products and the loss, scatters after the embedding
    # and 2 x 2 products: 5 and 5; backward the mirror. Norm weights are summed too: 48 + (2 x 2 x 4 + 4) x 4 = 128.
    run = run_of(tp=2, sp=True, qk_norm=True)
    expected = WORLD_OF_2 | {
        ("tp", "all_reduce"): Traffic(1, 128),
        ("tp", "all_gather"): Traffic(11, 10 * 96 + 40),
        ("tp", "reduce_scatter"): Traffic(10, 10 * 96),
    }
    assert traffic.step(run, [3], [5]) == expected
    expected["tp", "all_gather"] = Traffic(15, 14 * 96 + 40)  # the inputs of 2 x 2 products once more
    assert traffic.step(run_of(tp=2, sp=True, sp_regather=True, qk_norm=True), [3], [5]) == expected


def test_key_value_heads_held_whole_are_summed_by_hand():
    # One of 3 channels for two ranks: k and v are 3 x 4 on each, 24 numbers a block, a transfer a block.
    fewer = traffic.step(run_of(tp=2, num_kv_heads=1), [], [])
    assert fewer == WORLD_OF_2 | {("tp", "all_reduce"): Traffic(2, 2 * 24 * 4)}
    assert traffic.step(run_of(tp=2), [], []) == WORLD_OF_2


def test_sharded_by_hand():
    # One key/value head: q 6x4, k 3x4, v 3x4, o 4x6, gate 6x4, up 6x4, down 4x6. Over two ranks k's and v's 3 rows
    # become 4: 24 + 16 + 16 + 4 x 24 = 152 numbers. The embedding's 5 rows become 6: 24 numbers.
    # Gathered, 152 x 4 bytes / 2 = 304 sent, and 48. Two blocks: 4 x 304 + 48; reduced: 2 x 304 + 48.
    # Norms are summed: 2 x 8 + 4 numbers, 80 bytes.
    run = run_of(dp_shard=2, vocab_size=5, num_kv_heads=1)
    one = {
        ("dp_shard", "all_gather"): Traffic(5, 4 * 304 + 48),
        ("dp_shard", "reduce_scatter"): Traffic(3, 2 * 304 + 48),
        ("dp_shard", "all_reduce"): Traffic(1, 80),
    }
    assert traffic.step(run, [3], [5]) == WORLD_OF_2 | one
    # Empty passes move as much; under bfloat16 half is gathered of the blocks, as much reduced.
    twice = traffic.step(replaced(run, {"train.dtype": "bfloat16"}), [3, 0], [5, 0])
    assert twice["dp_shard", "all_gather"] == Traffic(10, 2 * (4 * 304 // 2 + 48))
    assert twice["dp_shard", "reduce_scatter"] == Traffic(6, 2 * (2 * 304 + 48))
    # Embedding and output stay gathered from one evaluation pass to the next.
    assert traffic.evaluation(run, [3, 3], [5, 5])["dp_shard", "all_gather"] == Traffic(5, 4 * 304 + 48)


def test_an_uneven_vocabulary_makes_ranks_differ():
    # 9 rows over tp: 5 and 4; over dp_shard each is chunked: 6 and 4 rows with the filling. Untied: twice.
    run = run_of(tp=2, dp_shard=2, vocab_size=9, tie_embeddings=False)
    assert [memory.gathered_numbers(run.model, run.parallel, rank)[1] for rank in range(4)] == [48, 32, 48, 32]
    sent = [traffic.step(run, [1], [1], rank)["dp_shard", "reduce_scatter"].bytes for rank in range(4)]
    assert [sent[0] - sent[1], sent[2] - sent[3]] == [(48 - 32) * 4 // 2] * 2


def test_copies_by_hand():
    # Blocks of 4 x 24 + 3 x 24 = 168 numbers in matrices, each in a transfer; embedding and output 40 and 40, each in
    # one; norms 20 in one. Of M bytes each of three copies sends 2 M 2/3.
    run = run_of(dp_replicate=3, tie_embeddings=False)
    sent = [2 * 168 * 4 * 2 // 3] * 2 + [2 * (40 * 4 * 2 // 3)] * 2 + [2 * (20 * 4 * 2 // 3)]
    assert traffic.step(run, [2], [5])["dp_replicate", "all_reduce"] == Traffic(5, sum(sent))


def test_muon_by_hand():
    # By size: q, k, v, o of 4 x 4, down 4 x 6, gate and up 6 x 4; of each this rank has half. Two at a time, one on each
    # rank: half of what is worked on elsewhere goes there, and half of what is worked on here goes back.
    run = run_of(tp=2, num_layers=1, head_dim=2, optimizer="muon")
    numbers = (8 + 8) + (8 + 8) + (12 + 12) + 12  # of the last, alone, one half goes one way
    for rank in (0, 1):
        assert traffic.step(run, [], [], rank)["tp", "all_to_all"] == Traffic(8, numbers * 4)
    assert ("model", "all_to_all") in traffic.step(replaced(run, {"parallel.dp_shard": 2}), [], [])


def test_the_loss_asks_once_a_block_of_rows():
    # 2^23 logits at a time over 16384 rows of the vocabulary: 512 tokens.
    run = run_of(tp=2, vocab_size=32768, length=1000)
    assert traffic.evaluation(run, [1], [1000])["tp", "all_gather"] == Traffic(2, 1000 * 2 * 4)
    assert ("tp", "all_gather") not in traffic.evaluation(run, [1], [0])
    assert (traffic.LOGITS_AT_ONCE, traffic.FEWEST_ROWS) == (loss._LOGITS_AT_ONCE, loss._FEWEST_ROWS)


@given(st.sampled_from((2, 4, 8)), st.integers(1, 5), st.integers(0, 4), st.integers(1, 6), st.booleans())
def test_sequence_parallelism_sends_what_tensor_parallelism_does(t, layers, count, length, wide):
    dtype = "float32" if wide else "bfloat16"
    plain = run_of(tp=t, num_heads=8, num_kv_heads=8, num_layers=layers, length=length * t, vocab_size=16, dtype=dtype)
    shared = replaced(plain, {"parallel.sp": True})
    deeper = {"model.num_layers": layers + 1}
    stream = count * length * t * 4 * (4 if wide else 2)

    def passed(run):
        """Bytes over tp of a pass alone: gradients of weights, summed at the step's end, taken off."""
        learned = count * run.data.sequence_length
        return traffic.total(traffic.step(run, [count], [learned]), "tp") - traffic.total(
            traffic.step(run, [], []), "tp"
        )

    def forward(run):
        return traffic.total(traffic.evaluation(run, [count], [0]), "tp")

    # Korthikanti et al.: a layer forward, two all-reduces; or as many gathers and scatters, half an all-reduce each.
    for run in (plain, shared):
        assert forward(replaced(run, deeper)) - forward(run) == 2 * 2 * (stream * (t - 1) // t)
    # Forward and backward.
    assert passed(replaced(plain, deeper)) - passed(plain) == 4 * 2 * (stream * (t - 1) // t)
    assert passed(replaced(shared, deeper)) - passed(shared) == 4 * 2 * (stream * (t - 1) // t)
    assert passed(shared) == passed(plain)
    again = passed(replaced(shared, {"parallel.sp_regather": True})) - passed(shared)
    assert again == layers * 2 * (stream * (t - 1) // t)  # a quarter more


@given(
    st.integers(1, 3), st.integers(1, 4), st.integers(1, 2), st.integers(1, 40), st.integers(1, 9), st.data(),
)  # fmt: skip
def test_every_rank_makes_as_many_passes_and_no_step_sends_more_than_the_estimate(
    copies, shards, tp, batch, most, data
):
    run = replaced(
        run_of(dp_replicate=copies, dp_shard=shards, tp=tp), {"train.batch": batch, "train.micro_batch": most}
    )
    ranks = [traffic.passes(run, rank) for rank in range(layout.ranks(run.parallel))]
    assert sum(map(sum, ranks)) == batch * tp
    assert len(set(map(len, ranks))) == 1
    assert max(map(max, ranks)) <= most
    learned = [data.draw(st.integers(0, 4 * count)) for count in ranks[-1]]
    sent = traffic.step(run, ranks[-1], learned, len(ranks) - 1)
    most_sent = traffic.estimate(run, len(ranks) - 1)
    assert all(sent[key].bytes <= most_sent[key].bytes and sent[key].calls <= most_sent[key].calls for key in sent)


def test_one_process_sends_nothing():
    assert traffic.estimate(TINY) == {}
    assert traffic.evaluation(TINY, [3], [5]) == {}


COUNTED = {
    "tp": (2, {"tp": 2, "qk_norm": True, "qkv_bias": True, "out_bias": True, "mlp_bias": True}),
    "sp": (2, {"tp": 2, "sp": True, "qk_norm": True, "out_bias": True, "mlp_bias": True, "dtype": "bfloat16"}),
    "sp, regather, kv heads whole": (4, {"tp": 4, "sp": True, "sp_regather": True, "num_kv_heads": 2, "qkv_bias": True, "optimizer": "muon"}),
    "3 shards": (3, {"dp_shard": 3, "tie_embeddings": False, "dtype": "bfloat16", "optimizer": "muon"}),
    "hybrid": (4, {"dp_replicate": 2, "dp_shard": 2, "qkv_bias": True}),
    "sp and shards": (4, {"tp": 2, "sp": True, "dp_shard": 2, "optimizer": "muon", "tie_embeddings": False}),
}  # fmt: skip


def batch_of(run, sequences, learned):
    """Sequences of which the first so many tokens are learned."""
    draw, length = np.random.default_rng(0), run.data.sequence_length
    tokens, targets = (draw.integers(0, run.model.vocab_size, (sequences, length)) for _ in range(2))
    targets.reshape(-1)[learned:] = IGNORED
    places = np.tile(np.arange(length), (sequences, 1))
    return MicroBatch(np.arange(sequences), tokens, targets, places, ((length,),) * sequences)


def counted(run, fed):
    """On a rank: what a step and an evaluation are counted to send, and what was said. `fed`: (sequences, learned) of each pass."""
    grid = once(mesh.make, replaced(run, {"parallel.links": ""}).parallel, torch.device("cpu"))
    links.choose(grid, run, grid.rank % 2 if grid.rank < 4 else 0)
    model, parts = build(run, grid)
    batches = [inputs(batch_of(run, *one), grid) for one in fed[grid.data_rank]]
    sequences, learned = zip(*fed[grid.data_rank], strict=True)

    def sent():
        return {key: Traffic(one.calls, one.bytes) for key, one in grid.counts.take().items()}

    sent()
    for one in batches:
        model(*one).backward()
    complete(parts, grid)
    if run.optim.name == "muon":
        hidden = [part for part in parts if part.name.startswith("layers.") and len(part.place.shape) == 2]
        on_whole(lambda matrix: matrix, [part.parameter.grad for part in hidden], hidden, run, grid)
    stepped = sent()
    with torch.no_grad():
        for one in batches:
            model(*one)
    told = [told(run, sequences, learned, grid.rank, grid.choices) for told in (traffic.step, traffic.evaluation)]
    evaluated = sent()
    made = {choice.algorithm for choices in grid.choices.values() for choice in choices.made.values()}
    for axis in grid.axes.values():  # the grid is kept for other tests
        axis.choices = axis.link = None
    return (stepped, evaluated), told, made


OTHER = {
    "few messages": {"message": 1.0},  # halving and rings
    "slow network": {"between": 1e-3, "rates": (1e6, 1e6)},  # inside hosts first
}


@pytest.mark.parametrize("other", ["", *OTHER])
@pytest.mark.parametrize("name", COUNTED)
def test_what_ranks_count(ranks, name, other, tmp_path):
    n, knobs = COUNTED[name]
    if other:
        hosts = tuple(rank // 2 for rank in range(n))
        knobs = knobs | {"links": str(tmp_path / "links.json")}
        slow = Library("all_reduce", (0, 0), ((1, 1.0), (2, 1.0)))  # of two ranks, the one with another way to go
        profile = Profile(hosts, 1e-4, 1e9, 1e-4, (1e9,) * (max(hosts) + 1), sums=1e9, library=(slow,))
        changed = {key: value[: max(hosts) + 1] if key == "rates" else value for key, value in OTHER[other].items()}
        write(tmp_path / "links.json", dataclasses.replace(profile, **changed))
    run = run_of(**{"vocab_size": 33, "length": 16, "num_heads": 4, "num_kv_heads": 4, "head_dim": 4, "intermediate_size": 20} | knobs)  # fmt: skip
    data = run.parallel.dp_replicate * run.parallel.dp_shard
    fed = [[(2, 20), (1, 7)]] + [[(2, 31 - rank), (0, 0)] for rank in range(1, data)]
    for counts, told, made in ranks.run(n, counted, run, fed):
        assert bool(other) == bool(made - {"library"}), made
        for one, said in zip(counts, told, strict=True):
            assert one == {key: sent for key, sent in said.items() if key[0] != "world"}
