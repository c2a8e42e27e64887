"""Which part of each parameter a rank keeps: the parts of all ranks are the whole, with the values it has there."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast import layout
from outlast.config import Model, Parallel
from outlast.model import hf
from outlast.model.transformer import Transformer
from outlast.plan import memory

CPU = torch.device("cpu")


@st.composite
def shapes(draw):
    """Any model, and a layout that fits it."""
    tp = draw(st.sampled_from([1, 2, 3, 4, 6]))
    kv = draw(st.sampled_from([n for n in (1, 2, 3, 4, 6, 8, 12) if n % tp == 0 or tp % n == 0]))
    of_kv = draw(st.integers(1, 3)) * (tp // math.gcd(tp, kv))
    switches = {name: draw(st.booleans()) for name in ("qk_norm", "qkv_bias", "out_bias", "mlp_bias", "tie_embeddings")}
    model = Model(
        vocab_size=draw(st.integers(tp, 40)), hidden_size=draw(st.integers(1, 12)), num_layers=draw(st.integers(1, 2)),
        intermediate_size=tp * draw(st.integers(1, 5)), num_kv_heads=kv, num_heads=kv * of_kv,
        head_dim=2 * draw(st.integers(1, 3)), **switches,
    )  # fmt: skip
    degrees = {axis: draw(st.integers(1, 4)) for axis in ("dp_replicate", "dp_shard")}
    degrees |= {axis: draw(st.integers(1, 2)) for axis in ("ring", "ulysses")}
    degrees["shard_sequence_ranks"] = draw(st.booleans())
    return model, Parallel(tp=tp, sp=draw(st.booleans()), **degrees)


@given(shapes())
def test_shapes_are_those_of_the_model(drawn):
    model, _ = drawn
    with torch.device("meta"):
        named = {name: tuple(p.shape) for name, p in Transformer(model).named_parameters()}
    assert layout.parameter_shapes(model) == named
    assert list(layout.parameter_shapes(model)) == list(named)
    assert sum(memory.parameters(model).values()) == sum(map(math.prod, named.values()))


@given(shapes())
def test_the_parts_of_a_copy_tile_each_parameter(drawn):
    model, parallel = drawn
    ranks = range(layout.ranks(parallel))
    for name, shape in layout.parameter_shapes(model).items():
        times = torch.zeros(shape, dtype=torch.int64)
        places = [layout.place(name, model, parallel, rank) for rank in ranks]
        for place in places:
            assert place.whole == shape
            times[place.slices] += 1
            assert times[place.slices].shape == place.shape
        # A part is held by as many ranks as the axes that do not split it have, and nothing by more.
        split = (parallel.tp if layout.tp_dim(name, model, parallel.tp) is not None else 1) * (
            layout.size(parallel, "shard") if layout.fsdp_shards(name) else 1
        )
        assert (times == len(ranks) // split).all(), name
        for rank, place in zip(ranks, places, strict=True):
            uncut = layout.tp_place(name, model, parallel, rank)
            assert all(a - b >= 0 and a + n <= b + m for a, n, b, m in zip(place.offset, place.shape, uncut.offset, uncut.shape, strict=True))  # fmt: skip


@given(shapes())
def test_heads_and_vocabulary_go_where_the_model_computes_with_them(drawn):
    """By hand, not by the names' tables: a rank's query heads, and the key/value heads that these read, are on it."""
    model, parallel = drawn
    k, group = model.head_dim, model.num_heads // model.num_kv_heads
    for rank in range(layout.ranks(parallel)):
        tp = layout.coordinates(parallel, rank)["tp"]
        rows = {
            name: layout.tp_place(f"layers.0.{name}.weight", model, parallel, rank)
            for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
        }
        heads = [head for head in range(model.num_heads) if head * parallel.tp // model.num_heads == tp]
        q, kv = rows["self_attn.q_proj"], rows["self_attn.k_proj"]
        assert (q.offset[0], q.shape[0]) == (heads[0] * k, len(heads) * k)
        assert (rows["self_attn.o_proj"].offset[1], rows["self_attn.o_proj"].shape[1]) == (heads[0] * k, len(heads) * k)
        read = {head // group for head in heads}
        here = range(kv.offset[0] // k, (kv.offset[0] + kv.shape[0]) // k)
        assert read <= set(here)
        assert read == set(here) or (len(here) == model.num_kv_heads and len(read) == 1)
        up, down = rows["mlp.up_proj"], rows["mlp.down_proj"]
        assert (up.offset[0], up.shape[0]) == (down.offset[1], down.shape[1])


def test_a_vocabulary_of_33_over_4_and_its_rows_over_3():
    model, parallel = replace(Model(), vocab_size=33), Parallel(tp=4, dp_shard=3)
    embedding = [layout.place("embed_tokens.weight", model, parallel, rank) for rank in range(12)]
    assert [place.offset[0] for place in embedding] == [0, 9, 17, 25, 3, 12, 20, 28, 6, 15, 23, 31]
    assert [place.shape[0] for place in embedding] == [3, 3, 3, 3, 3, 3, 3, 3, 3, 2, 2, 2]


@given(st.integers(0, 30), st.integers(1, 8))
def test_the_rows_of_dp_shard_are_those_of_torch_chunk(rows, ranks):
    chunks = [part.tolist() for part in torch.arange(rows).chunk(ranks)] if rows else []
    chunks += [[]] * (ranks - len(chunks))
    assert [list(layout.chunk(rows, ranks, rank)) for rank in range(ranks)] == chunks


def test_which_gradients_are_in_pieces():
    """By hand, a row a kind of parameter: without and with sequence parallelism, and with key/value heads whole."""
    model = replace(Model(), num_heads=4, num_kv_heads=2, qk_norm=True, qkv_bias=True, out_bias=True, mlp_bias=True)
    attention, block = "layers.0.self_attn.", "layers.0."
    always = {attention + "q_norm.weight", attention + "k_norm.weight"}
    whole_heads = {attention + f"{one}_proj.{kind}" for one in "kv" for kind in ("weight", "bias")}
    by_position = {block + "input_layernorm.weight", block + "post_attention_layernorm.weight", "norm.weight"}
    by_position |= {attention + "o_proj.bias", block + "mlp.down_proj.bias"}
    for tp, sp, wanted in (
        (1, False, set()),
        (2, False, always),
        (2, True, always | by_position),
        (4, False, always | whole_heads),
        (4, True, always | whole_heads | by_position),
    ):
        parallel = Parallel(tp=tp, sp=sp, dp_shard=2, dp_replicate=2)
        summed = {name: layout.summed(name, model, parallel) for name in layout.parameter_shapes(model) if "layers.0." in name or "layers" not in name}  # fmt: skip
        assert {name for name, axes in summed.items() if "tp" in axes} == wanted
        assert all("dp_replicate" in axes for axes in summed.values())
        assert {n for n, axes in summed.items() if "shard" in axes} == {n for n in summed if n.endswith("norm.weight")}
        assert layout.summed("norm.weight", model, Parallel(tp=tp, sp=sp)) == (("tp",) if sp and tp > 1 else ())


def test_gradients_of_ranks_that_share_sequences_are_summed_over_all_of_them_at_once():
    model, up = replace(Model(), qk_norm=True), "layers.0.mlp.up_proj.weight"
    for axes, sharing, of_matrices, of_norms in (
        ({"ring": 2}, False, ("sequence",), ("sequence",)),
        (
            {"ring": 2, "ulysses": 3, "dp_replicate": 2},
            False,
            ("sequence", "dp_replicate"),
            ("sequence", "dp_replicate"),
        ),
        ({"ulysses": 2, "dp_shard": 2}, False, ("sequence",), ("sequence", "shard")),
        ({"ulysses": 2, "dp_shard": 2}, True, (), ("shard",)),
        ({"ring": 2, "dp_replicate": 2}, True, ("dp_replicate",), ("shard", "dp_replicate")),
    ):
        parallel = Parallel(**axes, shard_sequence_ranks=sharing)
        assert layout.summed(up, model, parallel) == of_matrices
        assert layout.summed("norm.weight", model, parallel) == of_norms


def test_ranks_together_are_numbered_in_the_grids_order_and_counted_by_their_only_axis():
    parallel = Parallel(dp_replicate=2, dp_shard=2, ring=2, ulysses=3, tp=2, shard_sequence_ranks=True)
    assert [layout.size(parallel, name) for name in ("sequence", "shard", "model", "world", "tp")] == [6, 12, 24, 48, 2]
    assert [layout.coordinate(parallel, rank, "shard") for rank in range(0, 24, 2)] == list(range(12))
    assert layout.groups(parallel, "model")[0] == list(range(24))
    apart = Parallel(dp_shard=2, ring=2, tp=2)
    assert layout.groups(apart, "model")[0] == [0, 1, 4, 5]
    assert [layout.counted_as(apart, name) for name in ("sequence", "shard", "model")] == ["ring", "dp_shard", "model"]


@settings(max_examples=20)
@given(shapes(), st.integers(0, 3))
def test_initial_weights_are_cuts_of_one_processs(drawn, seed):
    model, parallel = drawn
    whole = dict(Transformer.on(CPU, model, torch.float64, seed).named_parameters())
    skeleton = Transformer(model, torch.float64)
    seen = Counter()
    for rank in range(layout.ranks(parallel)):
        places = {name: layout.place(name, model, parallel, rank) for name in whole}
        parts = {name: torch.full(place.shape, math.nan, dtype=torch.float64) for name, place in places.items()}
        skeleton.initialize(seed, ((name, parts[name], place) for name, place in places.items()))
        for name, part in parts.items():
            assert torch.equal(part, whole[name][places[name].slices]), name
            seen[name] += part.numel()
    assert all(seen[name] >= whole[name].numel() for name in whole)


LAYOUTS = [
    Parallel(tp=2, sp=True),
    Parallel(tp=4),
    Parallel(dp_shard=3),
    Parallel(tp=2, dp_shard=2, dp_replicate=2),
    Parallel(tp=4, dp_shard=5),
]


@pytest.mark.parametrize("parallel", LAYOUTS, ids=lambda p: f"{p.dp_replicate}x{p.dp_shard}x{p.tp}")
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_a_directorys_weights_are_loaded_by_parts(tmp_path, parallel, tie):
    model = Model(
        vocab_size=33, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4,
        qk_norm=True, tie_embeddings=tie,
    )  # fmt: skip
    one = Transformer.on(CPU, model, torch.float32, 3)
    whole = {name: p.detach() for name, p in one.named_parameters()}
    hf.save(whole, model, tmp_path, torch.float32, max_positions=64)
    with torch.device("meta"):
        skeleton = Transformer(model)
    for rank in range(layout.ranks(parallel)):
        places = {name: layout.place(name, model, parallel, rank) for name in whole}
        parts = {name: torch.full(place.shape, math.nan) for name, place in places.items()}
        hf.load(skeleton, tmp_path, [(name, parts[name], place) for name, place in places.items()])
        assert all(torch.equal(part, whole[name][places[name].slices]) for name, part in parts.items())
