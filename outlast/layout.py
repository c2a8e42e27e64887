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

AXES: Final = ("dp_replicate", "dp_shard", "ring", "ulysses", "tp")
"""Axes of the rank grid, slowest first."""

FED_ALIKE: Final = ("ring", "ulysses", "tp")
"""Axes along which ranks are fed the same samples."""

SUMMED: Final = ("tp", "sequence", "shard", "dp_replicate")
"""Ranks over which gradients are summed, in this order: those of an axis, or of several together as :func:`joint` says."""

_ROWS: Final = ("embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_COLUMNS: Final = ("o_proj", "down_proj")


def degrees(parallel: Parallel) -> dict[str, int]:
    """Size of each axis, in the grid's order."""
    return {axis: getattr(parallel, axis) for axis in AXES}


def ranks(parallel: Parallel) -> int:
    """How many ranks a layout is for."""
    return math.prod(degrees(parallel).values())


def joint(parallel: Parallel) -> dict[str, tuple[str, ...]]:
    """Axes whose ranks also talk all together: to share each sequence, to share weights by rows, to share a whole copy."""
    shard = ("dp_shard", *(("ring", "ulysses") if parallel.shard_sequence_ranks else ()))
    return {"sequence": ("ring", "ulysses"), "shard": shard, "model": (*shard, "tp")}


def size(parallel: Parallel, name: str) -> int:
    """How many ranks an axis has, or several together."""
    axes = joint(parallel).get(name, (name,))
    return ranks(parallel) if name == "world" else math.prod(degrees(parallel)[axis] for axis in axes)


def counted_as(parallel: Parallel, name: str) -> str:
    """The name that several axes together are counted under: of all but one has one rank, that one's."""
    more = [axis for axis in joint(parallel).get(name, ()) if degrees(parallel)[axis] > 1]
    return more[0] if len(more) == 1 else name


def coordinates(parallel: Parallel, rank: int) -> dict[str, int]:
    """Where a rank stands on each axis."""
    where = {}
    for axis, size in reversed(degrees(parallel).items()):
        rank, where[axis] = divmod(rank, size)
    return where


def coordinate(parallel: Parallel, rank: int, name: str) -> int:
    """Where a rank stands among those of several axes together."""
    where, index = coordinates(parallel, rank), 0
    for axis in joint(parallel)[name]:
        index = index * degrees(parallel)[axis] + where[axis]
    return index


def groups(parallel: Parallel, name: str) -> list[list[int]]:
    """The ranks that meet along an axis, or along several together, each group in its order."""
    axes, found = joint(parallel).get(name, (name,)), {}
    for rank in range(ranks(parallel)):
        where = coordinates(parallel, rank)
        found.setdefault(tuple(where[axis] for axis in AXES if axis not in axes), []).append(rank)
    return list(found.values())


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
    _check_sequence(run.data.sequence_length, parallel)
    if parallel.ulysses > 1:
        _check_ulysses(run.model, parallel)
    if parallel.shard_sequence_ranks and size(parallel, "sequence") == 1:
        raise UsageError(
            "parallel.shard_sequence_ranks is on, and ring and ulysses are 1: nobody shares a sequence",
            fix="set parallel.ring or parallel.ulysses to 2 or more, or leave it out",
            key="parallel.shard_sequence_ranks",
        )
    if parallel.sp_regather and not parallel.sp:
        raise UsageError(
            "parallel.sp_regather is on, and parallel.sp is not: there is nothing gathered to gather again",
            fix="set parallel.sp too, or leave both out",
            key="parallel.sp_regather",
        )
    if parallel.dp_compress != "none":
        _check_compression(run)
    _check_transfers(run)
    if parallel.links not in ("", "measure") and not Path(parallel.links).is_file():
        raise UsageError(
            f"parallel.links is {parallel.links!r}, and there is no such file",
            fix='set it to "measure", to a links.json that a run has kept, or leave it out',
            key="parallel.links",
        )
    if there is not None and ranks(parallel) != there:
        product = " x ".join(f"{axis}={size}" for axis, size in degrees(parallel).items() if size > 1) or "of one rank"
        raise UsageError(
            f"the layout {product} is for {ranks(parallel)} rank{'s' if ranks(parallel) > 1 else ''}, and {there} were started",
            fix=f"start {ranks(parallel)} (torchrun --nproc-per-node {ranks(parallel)}), or set degrees whose product is {there}",
            key=next(f"parallel.{axis}" for axis, size in reversed(degrees(parallel).items()) if size > 1 or axis == AXES[0]),
        )  # fmt: skip


def _check_transfers(run: Run) -> None:
    """Refuse pieces and codes for what does not travel, or already travels so."""
    parallel = run.parallel
    if parallel.overlap > 1 and not parallel.sp:
        raise UsageError(
            f"parallel.overlap is {parallel.overlap}, and parallel.sp is not on: nothing is gathered for products to overlap with",
            fix="set parallel.sp and parallel.tp, or leave parallel.overlap at 0",
            key="parallel.overlap",
        )
    if parallel.tp_compress != "none" and parallel.tp == 1:
        raise UsageError(
            f"parallel.tp_compress is {parallel.tp_compress}, and parallel.tp is 1: no activations travel",
            fix="set parallel.tp to 2 or more, or parallel.tp_compress to none",
            key="parallel.tp_compress",
        )
    if parallel.tp_compress == "bf16" and run.train.dtype == "bfloat16":
        raise UsageError(
            "parallel.tp_compress is bf16, and activations are bfloat16 already",
            fix="set parallel.tp_compress to int8 or none, or train.dtype to float32",
            key="parallel.tp_compress",
        )


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


def _check_compression(run: Run) -> None:
    """There must be copies to send to, and 1-bit must have AdamW's momentum to send, and steps to do it in."""
    parallel, kind = run.parallel, run.parallel.dp_compress
    if parallel.dp_replicate == 1:
        sharded = "under full sharding gradients travel inside FSDP's reduce-scatter, which is not compressed: "
        raise UsageError(
            f"parallel.dp_compress is {kind}, and parallel.dp_replicate is 1: there are no copies to send gradients to",
            fix=f"{sharded if parallel.dp_shard > 1 else ''}set parallel.dp_replicate to 2 or more, or leave parallel.dp_compress out",
            key="parallel.dp_compress",
        )
    if kind == "onebit" and run.optim.name != "adamw":
        raise UsageError(
            f"parallel.dp_compress is onebit, and optim.name is {run.optim.name}: what 1-bit sends is AdamW's momentum",
            fix="set optim.name to adamw, or parallel.dp_compress to bf16 or topk",
            key="parallel.dp_compress",
        )
    if kind == "onebit" and parallel.dp_exact_steps >= run.train.steps:
        raise UsageError(
            f"the first {parallel.dp_exact_steps} steps are sent exactly, and the run has {run.train.steps}: none would be sent in 1 bit",
            fix="lower parallel.dp_exact_steps, or leave parallel.dp_compress out",
            key="parallel.dp_exact_steps",
        )


def _kv_fits(kv_heads: int, ranks: int) -> bool:
    return kv_heads % ranks == 0 or ranks % kv_heads == 0


def _check_sequence(length: int, parallel: Parallel) -> None:
    """Every rank must have as many tokens of a sequence as any other."""
    sharing = {"ring": parallel.ring, "ulysses": parallel.ulysses, "tp": parallel.tp if parallel.sp else 1}
    names = " x ".join(f"{axis}={degree}" for axis, degree in sharing.items() if degree > 1)
    parts = math.prod(sharing.values())
    if length % parts:
        near = " or ".join(str(n) for n in (length // parts * parts, (length // parts + 1) * parts) if n)
        raise UsageError(
            f"cannot share {length} positions among {names} ranks{' under sequence parallelism' if parallel.sp else ''}",
            fix=f"nearest that divides: {near}{'; or leave parallel.sp out (--parallel.no-sp)' if parallel.sp else ''}",
            key="data.sequence_length",
        )


def _check_ulysses(model: Model, parallel: Parallel) -> None:
    """The heads that a rank of tp has are shared once more: whole ones, no key/value head's queries torn apart."""
    heads, kv = model.num_heads // parallel.tp, max(1, model.num_kv_heads // parallel.tp)
    fits = [n for n in range(1, heads + 1) if heads % n == 0 and _kv_fits(kv, n)]
    can_be = f"ulysses can be {', '.join(map(str, fits))}"
    each = f" that each rank of tp={parallel.tp} has" if parallel.tp > 1 else ""
    if heads % parallel.ulysses:
        wrong, why = (
            f"{heads} attention heads",
            f"heads per rank must be whole: {can_be}; parallel.ring takes any number",
        )
    elif not _kv_fits(kv, parallel.ulysses):
        wrong = f"{kv} key/value heads"
        why = f"a key/value head's {heads // kv} query heads would be torn apart unevenly: {can_be}; parallel.ring takes any number"
    else:
        return
    raise UsageError(f"cannot share {wrong}{each} over ulysses={parallel.ulysses}", fix=why, key="parallel.ulysses")


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


def largest(share: float, elements: int) -> int:
    """How many of a tensor's elements top-k sends: a share of them, rounded up."""
    return math.ceil(share * elements)


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


def row_bytes(numbers: int, wide: int, compress: str) -> int:
    """Bytes of a row of activations as it travels over tp.

    Args:
        numbers: in the row.
        wide: bytes of one in the compute type.
        compress: `parallel.tp_compress`; in 8 bits a row has a scale of 4 bytes.
    """
    return {"none": wide * numbers, "bf16": 2 * numbers, "int8": numbers + 4}[compress]


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
    return part.cut(0, chunk(part.shape[0], size(parallel, "shard"), coordinate(parallel, rank, "shard")))


def summed(name: str, model: Model, parallel: Parallel) -> tuple[str, ...]:
    """Ranks, of :data:`SUMMED`, over which a parameter's gradient is still in pieces after the backward pass.

    Over tp: where each rank holds the parameter whole, but put only its own heads or, under sequence parallelism, its
    own positions through it. Over those that share a sequence, and dp_shard: where FSDP2 has not done it.
    """
    module = name.split(".")[-2]
    some_heads = module in ("q_norm", "k_norm", "k_proj", "v_proj")
    over_tp = tp_dim(name, model, parallel.tp) is None and (some_heads or parallel.sp)
    by_us = not fsdp_shards(name)
    over_sequence = not parallel.shard_sequence_ranks  # else the ranks of shard are these, too
    pieces = {"tp": over_tp, "sequence": over_sequence, "shard": by_us, "dp_replicate": True}
    return tuple(name for name in SUMMED if pieces[name] and size(parallel, name) > 1)
