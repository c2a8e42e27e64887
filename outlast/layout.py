"""How ranks share a run: the grid they stand on, who takes which samples, how each tensor is split. No torch.

The grid is numbered so that the axis that talks most varies fastest: neighbours in `tp` are neighbouring ranks.
"""

import functools
import math
from pathlib import Path
from typing import Final

from outlast.config import Model, Parallel, Run
from outlast.errors import UsageError
from outlast.places import Place

AXES: Final = ("dp_replicate", "dp_shard", "tp")
"""Axes of the rank grid, slowest first."""

_ROWS: Final = ("embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_COLUMNS: Final = ("o_proj", "down_proj")


def degrees(parallel: Parallel) -> dict[str, int]:
    """Size of each axis, in the grid's order."""
    return {axis: getattr(parallel, axis) for axis in AXES}


def ranks(parallel: Parallel) -> int:
    """How many ranks a layout is for."""
    return math.prod(degrees(parallel).values())


def coordinates(parallel: Parallel, rank: int) -> dict[str, int]:
    """Where a rank stands on each axis."""
    where = {}
    for axis, size in reversed(degrees(parallel).items()):
        rank, where[axis] = divmod(rank, size)
    return where


def along(parallel: Parallel, rank: int, axis: str) -> list[int]:
    """The ranks that a rank meets along an axis, itself among them, in the axis's order."""
    sizes = degrees(parallel)
    stride = math.prod(list(sizes.values())[list(sizes).index(axis) + 1 :])
    first = rank - coordinates(parallel, rank)[axis] * stride
    return list(range(first, first + stride * sizes[axis], stride))


def data_rank(parallel: Parallel, rank: int) -> tuple[int, int]:
    """How many differently fed ranks there are, and which of them this one is."""
    where = coordinates(parallel, rank)
    return parallel.dp_replicate * parallel.dp_shard, where["dp_replicate"] * parallel.dp_shard + where["dp_shard"]


def check(run: Run, there: int | None = None) -> None:
    """Refuse a layout that does not fit the model, the samples, or the ranks there are.

    Args:
        run: its [parallel], [model] and [data] knobs are looked at; a vocabulary of 0 is one not yet known.
        there: how many ranks were started; None where they are still to be.

    Raises:
        UsageError: naming the degree and the ones that fit.
    """
    parallel, tp = run.parallel, run.parallel.tp
    if tp > 1:
        _check_tensor_parallel(run.model, tp)
    if parallel.sp and tp == 1:
        raise UsageError(
            "parallel.sp is on, and parallel.tp is 1: there is nobody to share the positions with",
            fix="set parallel.tp to 2 or more, or leave parallel.sp out (--parallel.no-sp)",
            key="parallel.sp",
        )
    if parallel.sp and run.data.sequence_length % tp:
        length = run.data.sequence_length
        near = [str(n) for n in (length // tp * tp, (length // tp + 1) * tp) if n]
        raise UsageError(
            f"cannot share {length} positions among tp={tp} ranks under sequence parallelism",
            fix=f"nearest that divides: {' or '.join(near)}; or leave parallel.sp out (--parallel.no-sp)",
            key="data.sequence_length",
        )
    if parallel.sp_regather and not parallel.sp:
        raise UsageError(
            "parallel.sp_regather is on, and parallel.sp is not: there is nothing gathered to gather again",
            fix="set parallel.sp too, or leave both out",
            key="parallel.sp_regather",
        )
    if parallel.links not in ("", "measure") and not Path(parallel.links).is_file():
        raise UsageError(
            f"parallel.links is {parallel.links!r}, and there is no such file",
            fix='set it to "measure", to a links.json that a run has kept, or leave it out',
            key="parallel.links",
        )
    if there is not None and ranks(parallel) != there:
        product = " x ".join(f"{axis}={size}" for axis, size in degrees(parallel).items())
        raise UsageError(
            f"the layout {product} is for {ranks(parallel)} ranks, and {there} were started",
            fix=f"start {ranks(parallel)} (torchrun --nproc-per-node {ranks(parallel)}), or set degrees whose product is {there}",
            key=next(f"parallel.{axis}" for axis, size in reversed(degrees(parallel).items()) if size > 1 or axis == AXES[0]),
        )  # fmt: skip


def _check_tensor_parallel(model: Model, tp: int) -> None:
    """Heads and channels a rank must be whole, and a key/value head must not serve half a rank's query heads."""
    heads, kv = model.num_heads, model.num_kv_heads
    fits = [n for n in range(1, heads + 1) if heads % n == 0 and _kv_fits(kv, n) and model.intermediate_size % n == 0]
    can_be = f"tp can be {', '.join(map(str, fits))}"
    if heads % tp:
        wrong, why = f"{heads} attention heads", f"heads per rank must be whole: {can_be}"
    elif not _kv_fits(kv, tp):
        wrong = f"{kv} key/value heads"
        why = f"a key/value head's {heads // kv} query heads would be torn apart unevenly: {can_be}"
    elif model.intermediate_size % tp:
        wrong, why = (
            f"{model.intermediate_size} feed-forward channels",
            f"channels per rank must be whole: {can_be}",
        )
    elif model.vocab_size and model.vocab_size < tp:
        wrong, why = f"a vocabulary of {model.vocab_size}", "each rank must hold at least one token"
    else:
        return
    raise UsageError(f"cannot split {wrong} over tp={tp}", fix=why, key="parallel.tp")


def _kv_fits(kv_heads: int, tp: int) -> bool:
    return kv_heads % tp == 0 or tp % kv_heads == 0


def share(first: int, stop: int, ranks: int, rank: int) -> range:
    """The stretch of positions [first, stop) that one of several ranks takes: contiguous, sizes at most one apart.

    Every position goes to exactly one rank; with more ranks than positions some get none.
    """
    each, more = divmod(stop - first, ranks)
    begin = first + rank * each + min(rank, more)
    return range(begin, begin + each + (rank < more))


def chunk(size: int, ranks: int, rank: int) -> range:
    """The rows that FSDP2 gives a rank: all ranks the same number, rounded up, the last ones less or none."""
    each = -(-size // ranks)
    return range(min(rank * each, size), min((rank + 1) * each, size))


def passes(batch: int, micro_batch: int, ranks: int) -> int:
    """How many forward passes make a step: as many as the rank with the largest share needs."""
    return -(-len(share(0, batch, ranks, 0)) // micro_batch)


def sent(op: str, size: int, ranks: int) -> int:
    """Bytes one rank sends in a collective.

    Args:
        op: `all_reduce`, `all_gather`, `reduce_scatter` or `all_to_all`.
        size: bytes of the whole: of what is reduced, of all parts together, of what a rank hands out.
        ranks: that take part.

    Source: Chan et al. 2007, "Collective communication: theory, practice, and experience", table 1: the least that each
        can do with; an all-reduce is a reduce-scatter and an all-gather.
    """
    return size * (ranks - 1) // ranks * (2 if op == "all_reduce" else 1)


@functools.cache  # asked for every parameter, and by Muon in every step
def parameter_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter, in the model's order; a tied output projection is the embedding."""
    d, f, k = model.hidden_size, model.intermediate_size, model.head_dim
    q, kv = model.num_heads * k, model.num_kv_heads * k
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (model.vocab_size, d)}
    for layer in range(model.num_layers):
        at = f"layers.{layer}."
        shapes[at + "input_layernorm.weight"] = (d,)
        for name, rows, columns, bias in (
            ("self_attn.q_proj", q, d, model.qkv_bias),
            ("self_attn.k_proj", kv, d, model.qkv_bias),
            ("self_attn.v_proj", kv, d, model.qkv_bias),
            ("self_attn.o_proj", d, q, model.out_bias),
            ("mlp.gate_proj", f, d, model.mlp_bias),
            ("mlp.up_proj", f, d, model.mlp_bias),
            ("mlp.down_proj", d, f, model.mlp_bias),
        ):
            if name == "mlp.gate_proj":
                if model.qk_norm:
                    shapes[at + "self_attn.q_norm.weight"] = shapes[at + "self_attn.k_norm.weight"] = (k,)
                shapes[at + "post_attention_layernorm.weight"] = (d,)
            shapes[f"{at}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{at}{name}.bias"] = (rows,)
    shapes["norm.weight"] = (d,)
    if not model.tie_embeddings:
        shapes["lm_head.weight"] = (model.vocab_size, d)
    return shapes


def tp_dim(name: str, model: Model, tp: int) -> int | None:
    """The axis of a parameter that tensor parallelism splits; None where each rank holds it whole."""
    module, kind = name.split(".")[-2:]
    if module in ("k_proj", "v_proj") and model.num_kv_heads % tp:
        return None  # fewer key/value heads than ranks: each rank holds them all and uses the one it needs
    if module in _ROWS:
        return 0
    return 1 if module in _COLUMNS and kind == "weight" else None


def fsdp_shards(name: str) -> bool:
    """Whether dp_shard splits a parameter. Norms are small, and stay exact where products are in bfloat16."""
    return not name.endswith("norm.weight")


def tp_place(name: str, model: Model, parallel: Parallel, rank: int) -> Place:
    """The part of a parameter that a rank computes with: what tensor parallelism leaves of it."""
    place = Place.all_of(parameter_shapes(model)[name])
    dim = tp_dim(name, model, parallel.tp)
    if dim is None:
        return place
    return place.cut(dim, share(0, place.shape[dim], parallel.tp, coordinates(parallel, rank)["tp"]))


def place(name: str, model: Model, parallel: Parallel, rank: int) -> Place:
    """The part of a parameter that a rank keeps between steps, with its gradient and its moments."""
    part = tp_place(name, model, parallel, rank)
    if not fsdp_shards(name):
        return part
    return part.cut(0, chunk(part.shape[0], parallel.dp_shard, coordinates(parallel, rank)["dp_shard"]))


def summed(name: str, model: Model, parallel: Parallel) -> tuple[str, ...]:
    """Axes over which a parameter's gradient is still in pieces after the backward pass, and must be summed.

    Over tp: where each rank holds the parameter whole, but put only its own heads or, under sequence parallelism, its
    own positions through it. Over dp_shard: where FSDP2 has not done it.
    """
    module = name.split(".")[-2]
    some_heads = module in ("q_norm", "k_norm", "k_proj", "v_proj")
    over_tp = tp_dim(name, model, parallel.tp) is None and (some_heads or parallel.sp)
    pieces = {"tp": over_tp, "dp_shard": not fsdp_shards(name), "dp_replicate": True}
    return tuple(axis for axis, wanted in pieces.items() if wanted and degrees(parallel)[axis] > 1)
