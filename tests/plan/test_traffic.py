"""Bytes sent, worked out by hand on small shapes, and against what ranks count."""

import dataclasses
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import once

from outlast import layout
from outlast.config import Parallel, Run, replaced
from outlast.data import IGNORED
from outlast.data.batches import MicroBatch
from outlast.links import Library, Profile, write
from outlast.model import loss
from outlast.parallel import build, links, mesh
from outlast.parallel.gradients import complete
from outlast.parallel.inputs import inputs, learned_here
from outlast.parallel.matrices import on_whole
from outlast.plan import memory, traffic
from outlast.plan.traffic import Traffic
from outlast.train.optimizer import Optimizer

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
    places |= {name: f"train.{name}" for name in ("recompute", "recompute_layers")}
    axes = [field.name for field in fields(Parallel)]
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


def test_rounded_activations_by_hand():
    # 12 tokens of 4 numbers: 16 bytes a token, 8 in bfloat16, 4 and a scale of 4 in eight bits: 192, 96, 96 bytes. Half
    # of that in each of 10 gathers and 10 scatters; norms and the loss are as they were.
    exact = traffic.step(run_of(tp=2, sp=True, qk_norm=True), [3], [5])
    for code, half in (("bf16", 48), ("int8", 48)):
        sent = traffic.step(run_of(tp=2, sp=True, qk_norm=True, tp_compress=code), [3], [5])
        assert sent == exact | {
            ("tp", "all_gather"): Traffic(11, 10 * half + 40),
            ("tp", "reduce_scatter"): Traffic(10, 10 * half),
        }
    # Wide rows: 2 and close to 4 times fewer.
    wide = {code: traffic.total(traffic.step(run_of(tp=2, sp=True, hidden_size=1000, tp_compress=code), [3], [0]), "tp") for code in ("none", "bf16", "int8")}  # fmt: skip
    norms = 5 * 1000 * 4
    assert (wide["none"] - norms) / (wide["bf16"] - norms) == 2
    assert (wide["none"] - norms) / (wide["int8"] - norms) == 4000 / 1004
    # Over three ranks 4 tokens are 2, 1 and 1: 8 bytes a token, of those of others to sum, and of one's own to two.
    run = run_of(tp=3, num_heads=3, num_kv_heads=3, intermediate_size=6, tp_compress="int8")
    for rank, mine in enumerate((2, 1, 1)):
        sent = traffic.step(run, [1], [0], rank)
        assert sent["tp", "reduce_scatter"] == Traffic(10, 10 * (4 - mine) * 8)
        assert sent["tp", "all_gather"] == Traffic(10, 10 * 2 * mine * 8)


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


def test_ulysses_by_hand():
    # A rank has 3 sequences x 2 tokens. It sends the other, of its 2 query heads, 2 keys, 2 values of 3 channels, half: 3
    # heads x 3 x 4 bytes x 6 tokens = 216; and of the output one head, 72. Two blocks forward, and as much backward.
    one = traffic.step(run_of(ulysses=2), [3], [5])
    assert one["ulysses", "all_to_all"] == Traffic(2 * 2 * 2, 2 * 2 * (216 + 72))
    # One key/value head for both ranks: 1 query + 1 key + 1 value, all the same.
    fewer = traffic.step(run_of(ulysses=2, num_kv_heads=1), [3], [5])
    assert fewer["ulysses", "all_to_all"] == one["ulysses", "all_to_all"]
    # Every gradient is summed over the two: a block's 4 x 6 x 4 + 3 x 24 = 168, embedding 40, norms 20.
    assert one["ulysses", "all_reduce"] == Traffic(4, (2 * 168 + 40 + 20) * 4)
    # Over four, of 8 tokens 2 on each: 3 others get of 4 query heads one, of one key/value head that.
    four = traffic.evaluation(run_of(ulysses=4, num_heads=4, num_kv_heads=1, length=8), [3], [5])
    assert four["ulysses", "all_to_all"] == Traffic(4, 2 * 6 * 3 * (3 + 1) * 3 * 4)


def test_ring_by_hand():
    # A rank of 2 has 3 sequences x 2 tokens: keys and values are 6 x 2 heads x 2 x 3 channels = 72 numbers, 288 bytes. Two
    # blocks forward, once more backward, and the gradients.
    one = traffic.step(run_of(ring=2), [3], [5])
    assert one["ring", "shift"] == Traffic(2 * 3, 2 * 3 * 288)
    assert one["ring", "all_reduce"] == Traffic(4, (2 * 168 + 40 + 20) * 4)
    assert traffic.evaluation(run_of(ring=2), [3], [5])["ring", "shift"] == Traffic(2, 2 * 288)
    # In bfloat16 the gradients are twice as wide as what they are of.
    narrow = traffic.step(run_of(ring=4, dtype="bfloat16"), [3], [5])
    assert narrow["ring", "shift"] == Traffic(2 * 3 * 3, 2 * 3 * (72 + 72 + 144))
    # Both together are summed over at once, and are counted by a name of their own.
    both = traffic.step(run_of(ring=2, ulysses=2), [3], [5])
    assert both["sequence", "all_reduce"] == Traffic(4, 2 * 3 * (2 * 168 + 40 + 20) * 4 // 4)
    # Sharing weights they gather and scatter them: as dp_shard does.
    shared = traffic.step(run_of(ring=2, shard_sequence_ranks=True), [3], [5])
    as_data = traffic.step(run_of(dp_shard=2), [3], [5])
    for op in ("all_gather", "reduce_scatter", "all_reduce"):
        assert shared["ring", op] == as_data["dp_shard", op]


def test_ulysses_sends_less_the_more_ranks_there_are_and_a_ring_does_not():
    def sent(**axes):
        run = run_of(num_heads=16, num_kv_heads=16, length=64, **axes)
        return {key[1]: one.bytes for key, one in traffic.evaluation(run, [1], [0]).items() if key[0] != "world"}

    stream = 2 * 64 * 16 * 3 * 4  # of two blocks: queries as wide as all heads
    for n in (2, 4, 8):
        # Jacobs et al.: 4 N h / P a link, less what stays at home; a ring's keys and values go round whole.
        assert sent(ulysses=n)["all_to_all"] == 4 * stream * (n - 1) // n**2
        assert sent(ring=n)["shift"] == 2 * stream * (n - 1) // n


def test_copies_that_send_less_by_hand():
    # Two blocks of 168 numbers in matrices, embedding 40, norms 20: none divides by 3 but 168; 41 is 40 filled up, 21 20.
    run = run_of(dp_replicate=3)

    def sent(number=None, rank=0, **knobs):
        told = replaced(run, {f"parallel.{name}": value for name, value in knobs.items()})
        return {op: one for (axis, op), one in traffic.step(told, [], [], rank, number).items() if axis != "world"}

    halves = 2 * (2 * 168 * 2 // 3) + 2 * 42 * 2 // 3 + 2 * 21 * 2 // 3
    assert sent(dp_compress="bf16") == {op: Traffic(4, halves) for op in ("reduce_scatter", "all_gather")}
    # A tenth, rounded up: of q, k, v, o, gate, up, down of 24 each 3, so 21 a block; of the embedding 4; of five norms of
    # 4 one each. Each 4 + 4 bytes, to two others.
    numbers = 2 * 21 + 4 + 5
    assert sent(dp_compress="topk", dp_topk=0.1) == {"all_gather": Traffic(4, 2 * numbers * 8)}
    # Rows: of 6 (q, k, v, gate, up) 2 each; of 4 (o, down; the norms) 2, 2, none; of 10 (embedding) 4, 4, 2.
    # The first two own 5 x 2 x 4 + 2 x 2 x 6 = 64 numbers a block, and 16 + 5 x 2 outside: 154, 20 bytes of signs. The last
    # 5 x 2 x 4 = 40 and 8: 88, 11 bytes. With 20 scales of 4 bytes: 100, 100, 91.
    for rank, others in ((0, 191), (1, 191), (2, 200)):
        assert sent(rank=rank, dp_compress="onebit") == {
            "all_to_all": Traffic(1, others),
            "all_gather": Traffic(1, 200),
        }
    exact = sent()
    assert sent(100, dp_compress="onebit") == exact
    assert sent(101, dp_compress="onebit") == sent(dp_compress="onebit")
    assert set(exact) == {"all_reduce"}


def test_signs_take_a_thirty_second_of_an_all_reduce():
    wide = run_of(
        dp_replicate=2,
        hidden_size=512,
        intermediate_size=1536,
        num_heads=8,
        num_kv_heads=8,
        head_dim=64,
        vocab_size=4096,
    )
    exact, signs, half = (
        traffic.total(traffic.estimate(replaced(wide, {"parallel.dp_compress": how})), "dp_replicate")
        for how in ("none", "onebit", "bf16")
    )
    assert 31.9 < exact / signs < 32
    assert exact == 2 * half


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


@pytest.mark.parametrize("sp", [False, True])
def test_a_recomputed_block_by_hand(sp):
    """3 x 4 tokens x 4 channels x 4 bytes = 192: an all-reduce over two sends 192, a gather or scatter 96."""

    def sent(**knobs):
        return traffic.total(traffic.step(run_of(tp=2, sp=sp, **knobs), [3], [5]), "tp")

    # Attention's summand is summed again, feed-forward's is not: one all-reduce a block. Under sp both are, with
    # their products, and gathered again are both inputs.
    assert sent(recompute="full") - sent() == 2 * (4 * 96 if sp else 192)
    assert sent(recompute="full", recompute_layers=1) - sent() == (4 * 96 if sp else 192)
    # Behind the last sum is a dropout mask that the backward pass needs.
    assert sent(recompute="full", dropout=0.1) - sent(dropout=0.1) == 2 * (4 * 96 if sp else 2 * 192)
    assert sent(recompute="attention") == sent()
    forward = [traffic.evaluation(run_of(tp=2, sp=sp, recompute=kind), [3], [5]) for kind in ("none", "full")]
    assert forward[0] == forward[1]


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
    "sp, in pieces": (2, {"tp": 2, "sp": True, "overlap": 8, "qkv_bias": True}),
    "sp, in pieces of 8 bits, regather": (4, {"tp": 4, "sp": True, "sp_regather": True, "overlap": 16, "tp_compress": "int8"}),
    "tp in 8 bits": (3, {"tp": 3, "num_heads": 3, "num_kv_heads": 3, "intermediate_size": 21, "tp_compress": "int8"}),
    "tp in 16 bits": (2, {"tp": 2, "tp_compress": "bf16"}),
    "3 shards": (3, {"dp_shard": 3, "tie_embeddings": False, "dtype": "bfloat16", "optimizer": "muon"}),
    "hybrid": (4, {"dp_replicate": 2, "dp_shard": 2, "qkv_bias": True}),
    "ulysses": (2, {"ulysses": 2, "num_kv_heads": 2, "qk_norm": True}),
    "ulysses, kv heads for each": (4, {"ulysses": 4, "num_kv_heads": 1, "dtype": "bfloat16"}),
    "ring": (2, {"ring": 2, "num_kv_heads": 2}),
    "ring in bfloat16": (3, {"ring": 3, "length": 24, "dtype": "bfloat16"}),
    "ring and ulysses": (4, {"ring": 2, "ulysses": 2, "num_kv_heads": 2, "optimizer": "muon"}),
    "ring and sp": (4, {"ring": 2, "tp": 2, "sp": True, "num_kv_heads": 1}),
    "ulysses and tp": (4, {"ulysses": 2, "tp": 2, "num_kv_heads": 2}),
    "ring and ulysses share weights": (4, {"ring": 2, "ulysses": 2, "shard_sequence_ranks": True, "tie_embeddings": False}),
    "ring and shards": (4, {"ring": 2, "dp_shard": 2, "optimizer": "muon"}),
    "ring and shards share weights": (4, {"ring": 2, "dp_shard": 2, "shard_sequence_ranks": True, "optimizer": "muon"}),
    "copies in 16 bits": (3, {"dp_replicate": 3, "dp_compress": "bf16", "qkv_bias": True}),
    "largest over shards": (4, {"dp_replicate": 2, "dp_shard": 2, "dp_compress": "topk", "dp_topk": 0.03, "tie_embeddings": False}),
    "signs over tp": (4, {"dp_replicate": 2, "tp": 2, "sp": True, "dp_compress": "onebit", "qk_norm": True}),
    "signs of three": (3, {"dp_replicate": 3, "dp_compress": "onebit", "vocab_size": 5}),
    "signs over shards": (4, {"dp_replicate": 2, "dp_shard": 2, "dp_compress": "onebit"}),
    "sp and shards": (4, {"tp": 2, "sp": True, "dp_shard": 2, "optimizer": "muon", "tie_embeddings": False}),
    "tp, full": (2, {"tp": 2, "mlp_bias": True, "recompute": "full"}),
    "tp, full, dropout": (2, {"tp": 2, "recompute": "full", "recompute_layers": 1, "dropout": 0.1, "dtype": "bfloat16"}),
    "sp, full": (2, {"tp": 2, "sp": True, "recompute": "full", "recompute_layers": 1}),
    "sp, attention": (2, {"tp": 2, "sp": True, "recompute": "attention", "dropout": 0.1}),
    "sp and shards, full, regather": (4, {"tp": 2, "sp": True, "sp_regather": True, "dp_shard": 2, "recompute": "full"}),
    "sp and shards, full, dropout": (4, {"tp": 2, "sp": True, "dp_shard": 2, "recompute": "full", "dropout": 0.1}),
    "ring, attention": (2, {"ring": 2, "num_kv_heads": 2, "recompute": "attention"}),
    "ring and ulysses, full": (4, {"ring": 2, "ulysses": 2, "recompute": "full", "recompute_layers": 1}),
    "ulysses, attention": (2, {"ulysses": 2, "num_kv_heads": 1, "recompute": "attention", "dropout": 0.1}),
    "ulysses and sp, attention": (4, {"ulysses": 2, "tp": 2, "sp": True, "recompute": "attention"}),
    "3 shards, full": (3, {"dp_shard": 3, "recompute": "full", "dropout": 0.1, "dtype": "bfloat16"}),
}  # fmt: skip


NUMBER = 1000
"""Of the step: long after those that 1-bit sends exactly."""


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
    fed = [batch_of(run, *one) for one in fed[grid.data_rank]]
    batches = [inputs(one, grid) for one in fed]
    sequences, learned = zip(*((len(one.documents), learned_here(one, grid)) for one in fed), strict=True)

    def sent():
        return {key: Traffic(one.calls, one.bytes) for key, one in grid.counts.take().items()}

    sent()
    model.train()
    for one in batches:
        model(*one).backward()
    optimizer = Optimizer(parts, run, grid)
    copies = optimizer.copies
    complete(parts, grid, copies.sums(NUMBER))
    if copies.apart(NUMBER):
        grads = [part.parameter.grad for part in parts]
        copies.mean(parts, grads)
    if run.optim.name == "muon":
        hidden = [part for part in parts if part.name.startswith("layers.") and len(part.place.shape) == 2]
        on_whole(lambda matrix: matrix, [part.parameter.grad for part in hidden], hidden, run, grid)
    stepped = sent()
    model.eval()
    with torch.no_grad():
        for one in batches:
            model(*one)
    told = [
        told(run, sequences, learned, grid.rank, choices=grid.choices) for told in (traffic.step, traffic.evaluation)
    ]
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
        assert bool(other) == bool(made - {"library"}) or n == 3, made  # three ranks have little to choose from
        for one, said in zip(counts, told, strict=True):
            assert one == {key: sent for key, sent in said.items() if key[0] != "world"}
