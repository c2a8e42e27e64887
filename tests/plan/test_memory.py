"""Closed formulas by hand on small shapes, and against the model itself, whole and over ranks."""

import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import once

from outlast import layout
from outlast.config import Model, Parallel, Run
from outlast.data.batches import MicroBatch
from outlast.model.transformer import Transformer
from outlast.parallel import build, mesh
from outlast.parallel.inputs import inputs
from outlast.plan import memory
from outlast.train.optimizer import Optimizer

CPU = torch.device("cpu")

SHAPES = {
    "llama": Model(vocab_size=257, num_layers=3, hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2, head_dim=24),
    "qwen3": Model(vocab_size=33, num_layers=2, hidden_size=40, intermediate_size=56, num_heads=3, num_kv_heads=1, head_dim=8, qk_norm=True, tie_embeddings=False),
    "biases": Model(vocab_size=33, num_layers=1, hidden_size=40, qkv_bias=True, out_bias=True, mlp_bias=True),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_parameters(name):
    model = Transformer(SHAPES[name])
    assert sum(memory.parameters(SHAPES[name]).values()) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_state(dtype, optimizer):
    run = Run(model=SHAPES["llama"])
    run = replace(run, optim=replace(run.optim, name=optimizer), train=replace(run.train, dtype=dtype))
    grid = mesh.make(run.parallel, CPU)
    model, parts = build(run, grid)
    kept = Optimizer(parts, run, grid)
    for part in parts:
        part.parameter.grad = torch.zeros_like(part.parameter)
    gradients = sum(part.parameter.grad.nbytes for part in parts)
    kept.step(0.0)
    said = memory.state(run.model, dtype, optimizer)
    assert said.weights == sum(p.nbytes for p in model.parameters())
    assert said.gradients == gradients
    # torch counts steps too, a number a tensor
    moments = {name: one.tensor for name, one in kept.state().items() if not name.endswith(".step")}
    assert said.moments == sum(tensor.nbytes for tensor in moments.values())
    assert said.gathered == 0


def test_state_of_a_rank_by_hand():
    # tp 2 leaves rank 0: embedding 3 rows of 5; q 3x4; k, v whole, 3x4; o 4x3; gate, up 3x4; down 4x3; norms 3 of 4.
    # dp_shard 2 leaves it 2 rows of 3, and of 4: embedding 8; q, k, v, gate, up 8 each; o and down 6 each: 60. Norms 12.
    shape = Model(
        vocab_size=5, hidden_size=4, intermediate_size=6, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=3
    )
    grid = Parallel(tp=2, dp_shard=2)
    # Gathered, 3 rows are filled up to 4: embedding 16; q, k, v, gate, up 16 each; o, down 12 each: 120 numbers.
    assert memory.state(shape, "float32", "adamw", grid) == memory.StateBytes(72 * 4, 72 * 4, 144 * 4, 120 * 4)
    # Muon keeps one moment less of the 52 numbers in the layer's matrices; in bfloat16 blocks are gathered in it.
    assert memory.state(shape, "bfloat16", "muon", grid) == memory.StateBytes(72 * 4, 72 * 4, 92 * 4, 16 * 4 + 104 * 2)
    # The last rank: embedding 2 rows of 5, one of them; one row of 3, two of 4: 4 + 5 x 4 + 2 x 6, and the norms.
    assert memory.state(shape, "float32", "adamw", grid, rank=3).weights == (4 + 20 + 12 + 12) * 4
    assert memory.state(shape, "float32", "adamw", grid).total == (72 + 72 + 144 + 120) * 4


@given(
    st.sampled_from((1, 2, 4)), st.integers(1, 3), st.integers(1, 2), st.sampled_from((1, 2, 4)), st.integers(5, 40),
    st.booleans(), st.booleans(),
)  # fmt: skip
def test_the_ranks_together_have_all_and_copies(tp, shards, copies, kv_heads, vocabulary, some_biases, tied):
    shape = Model(
        vocab_size=vocabulary, hidden_size=6, intermediate_size=12, num_layers=2, num_heads=4, num_kv_heads=kv_heads,
        head_dim=2, qk_norm=True, qkv_bias=some_biases, out_bias=some_biases, mlp_bias=some_biases, tie_embeddings=tied,
    )  # fmt: skip
    grid = Parallel(dp_replicate=copies, dp_shard=shards, tp=tp)
    ranks = [memory.state(shape, "float32", "adamw", grid, rank) for rank in range(copies * shards * tp)]
    assert max(ranks, key=lambda state: state.total) == ranks[0]
    together = 0
    for name, whole in layout.parameter_shapes(shape).items():
        norm = "norm" in name
        held_whole = ("k_proj" in name or "v_proj" in name) and kv_heads < tp
        leaving = name.endswith(("o_proj.bias", "down_proj.bias"))
        times = copies * (shards if norm else 1) * (tp if norm or held_whole or leaving else 1)
        together += times * math.prod(whole)
    assert sum(state.weights for state in ranks) == 4 * together
    assert sum(state.moments for state in ranks) == 8 * together


def kept_for_backward(model, *fed):
    """Bytes of every storage saved for the backward pass, each once, weights as they are kept apart."""
    own, saved = {p.untyped_storage()._cdata for p in model.parameters() if type(p) is torch.nn.Parameter}, []

    def pack(tensor):
        saved.append(tensor)  # held, so that no other takes its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(*fed)  # of sharded weights the whole is let go, its storage empty
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in saved}
    return sum(nbytes for storage, nbytes in storages.items() if storage not in own)


def kept_on_a_rank(run, documents):
    """What a model, or a rank's part of it, keeps of sequences that are learned whole."""
    grid = once(mesh.make, run.parallel, CPU)
    model, _ = build(run, grid)
    batch, length = len(documents), sum(documents[0])
    tokens = np.random.default_rng(0).integers(0, run.model.vocab_size, (batch, length))
    places = np.tile(np.arange(length), (batch, 1))
    one = MicroBatch(np.arange(batch), tokens, np.roll(tokens, -1, 1), places, documents)
    return kept_for_backward(model, *inputs(one, grid))


LAYOUTS = {
    "one": Parallel(),
    "tp": Parallel(tp=2),
    "sp": Parallel(tp=2, sp=True),
    "sp, regather": Parallel(tp=2, sp=True, sp_regather=True),
    "kv heads whole": Parallel(tp=4, sp=True),
    "sp, shards": Parallel(tp=2, sp=True, dp_shard=2),
    "ulysses": Parallel(ulysses=2),
    "ulysses, kv heads for each": Parallel(ulysses=4),
    "ring": Parallel(ring=2),
    "ring 4": Parallel(ring=4),
    "ring, ulysses": Parallel(ring=2, ulysses=2),
    "ring, sp": Parallel(ring=2, tp=2, sp=True, sp_regather=True),
    "ulysses, tp": Parallel(ulysses=2, tp=2),
    "ring, sharing weights": Parallel(ring=2, shard_sequence_ranks=True),
}


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_activations(ranks, name, dtype):
    run = Run(model=replace(SHAPES["llama"], vocab_size=300, qk_norm=dtype == "float32"), parallel=LAYOUTS[name])
    run = replace(run, train=replace(run.train, dtype=dtype))
    documents = ((100, 28), (28, 50, 50))
    n = layout.ranks(run.parallel)
    measured = ranks.run(n, kept_on_a_rank, run, documents) if n > 1 else [kept_on_a_rank(run, documents)]
    said = [memory.activations(run.model, dtype, 2, 128, run.parallel, rank) for rank in range(n)]
    assert said == measured


def test_activations_by_hand():
    # 4 tokens. A block keeps 4 x 4 of D, 3 x 8 of heads, 2 x 8 of keys and values, 3 x 8 of F: 80 numbers a token, 2
    # scales and 2 log-sum-exps. Around: 2 x 4 of D, a scale, cosines and sines 4, and 9 bytes. The gradient: 6 rows of 4.
    shape = Model(
        vocab_size=6, hidden_size=4, intermediate_size=8, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=4
    )

    def kept(**parallel):
        return memory.activations(shape, "float32", 1, 4, Parallel(**parallel))

    assert kept() == 4 * (4 * (80 + 4) + 4 * (8 + 1 + 4) + 9) + 4 * 24
    # Heads, keys, values, F halved, and the log-sum-exp: 16 + 64 / 2 = 48 and 2 + 1. Half of the rows.
    assert kept(tp=2) == 4 * (4 * (48 + 3) + 4 * (8 + 1 + 4) + 9) + 4 * 12
    # The block's input and the second norm's halved too, not what products take: 4 + 8 + 32 = 44 and 1 + 1; around 4 + 0.5.
    assert kept(tp=2, sp=True) == 4 * (4 * (44 + 2) + 4 * (4 + 0.5 + 4) + 9) + 4 * 12
    # That too: 4 + 4 + 32.
    assert kept(tp=2, sp=True, sp_regather=True) == 4 * (4 * (40 + 2) + 4 * (4 + 0.5 + 4) + 9) + 4 * 12


@given(st.sampled_from((2, 4, 8)), st.sampled_from((8, 16)), st.integers(1, 3), st.booleans())
def test_tensor_parallelism_divides_a_part_and_with_regathered_sequences_all(t, heads, sequences, qk_norm):
    shape = Model(vocab_size=50, hidden_size=24, intermediate_size=32, num_heads=heads, num_kv_heads=8, head_dim=4, qk_norm=qk_norm)  # fmt: skip

    def block(parallel):
        deeper, flat = (replace(shape, num_layers=layers) for layers in (2, 1))
        return sum(
            sign * memory.activations(one, "float32", sequences, 8 * t, parallel)
            for sign, one in ((1, deeper), (-1, flat))
        )

    one, tp, sp, all_of_it = (
        block(parallel)
        for parallel in (
            Parallel(),
            Parallel(tp=t),
            Parallel(tp=t, sp=True),
            Parallel(tp=t, sp=True, sp_regather=True),
        )
    )
    assert all_of_it * t == one
    tokens, width = sequences * 8 * t, 24 * 4
    # What tensor parallelism alone does not divide: 4 D and two scales; with sequence parallelism still 2 D, gathered.
    assert tp - all_of_it == tokens * (4 * width + 2 * 4) * (t - 1) // t
    assert sp - all_of_it == tokens * 2 * width * (t - 1) // t


def test_flops_by_hand():
    # One layer, no attention to speak of: 6 operations a multiplied weight.
    shape = Model(
        vocab_size=10, hidden_size=4, intermediate_size=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=4
    )
    assert memory.flops_per_token(shape, 0) == 6 * (4 * 4 * 4 + 3 * 4 * 8 + 10 * 4)
    assert memory.flops_per_token(shape, 100) - memory.flops_per_token(shape, 0) == 12 * 4 * 100


def test_llama_3_8b_by_its_published_size():
    shape = Model(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128,
        tie_embeddings=False,
    )  # fmt: skip
    assert sum(memory.parameters(shape).values()) == 8_030_261_248


def test_plan_loads_no_torch_and_fast():
    code = "import sys, outlast.plan.memory, outlast.plan.traffic; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
