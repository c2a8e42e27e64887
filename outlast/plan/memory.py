"""Bytes and operations of a model, or of one rank's part of it, by closed formula. No torch."""

from dataclasses import dataclass, replace
from typing import Final

from outlast import layout
from outlast.config import Model, Parallel
from outlast.places import Place

BYTES: Final = {"bfloat16": 2, "float32": 4, "float64": 8}
"""Bytes of a number, by type."""

PEAK_FLOPS: Final = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}
"""Dense bfloat16 operations a second, by a part of the device's name. Source: NVIDIA's data sheets, SXM versions."""

_ONE_RANK: Final = Parallel()


def peak_flops(device: str) -> float | None:
    """A device's peak in dense bfloat16, in operations a second, by its name; None where it is not known."""
    return next((flops for name, flops in PEAK_FLOPS.items() if name in device), None)


def parameters(shape: Model) -> dict[str, int]:
    """Count the parameters, by part: embedding, output (0 where tied), each layer's matrices, and all norms and biases."""
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    matrices = shape.hidden_size * (2 * query + 2 * key + 3 * shape.intermediate_size)
    small = 2 * shape.hidden_size + shape.qk_norm * 2 * shape.head_dim
    small += shape.qkv_bias * (query + 2 * key) + shape.out_bias * shape.hidden_size
    small += shape.mlp_bias * (2 * shape.intermediate_size + shape.hidden_size)
    embedding = shape.vocab_size * shape.hidden_size
    return {
        "embedding": embedding,
        "output": 0 if shape.tie_embeddings else embedding,
        "matrices": shape.num_layers * matrices,
        "norms and biases": shape.num_layers * small + shape.hidden_size,
    }


def widths(dtype: str) -> tuple[int, int]:
    """Bytes of a number in the compute type, and in the type that weights are kept and sums are taken in."""
    return BYTES[dtype], max(BYTES[dtype], BYTES["float32"])


def parts(shape: Model, parallel: Parallel, rank: int = 0) -> tuple[dict[str, Place], dict[str, Place]]:
    """What a rank keeps of each parameter of the first block, all blocks being alike, and of each outside the blocks."""
    one = replace(shape, num_layers=1)
    kept = {name: layout.place(name, one, parallel, rank) for name in layout.parameter_shapes(one)}
    block = {name: place for name, place in kept.items() if name.startswith("layers.")}
    return block, {name: place for name, place in kept.items() if name not in block}


def gathered_numbers(shape: Model, parallel: Parallel, rank: int = 0) -> tuple[int, int]:
    """Numbers in a block, and in embedding and output, as the ranks that share them by rows gather them.

    Norm weights are not among them. Each rank's rows are filled up to as many as the first has.
    """
    ranks = layout.size(parallel, "shard")
    whole = parts(shape, Parallel(tp=parallel.tp, sp=parallel.sp), layout.coordinates(parallel, rank)["tp"])
    block, rest = (
        sum(
            place.elements // place.shape[0] * len(layout.chunk(place.shape[0], ranks, 0)) * ranks
            for name, place in some.items()
            if layout.fsdp_shards(name)
        )
        for some in whole
    )
    return block, rest


@dataclass(frozen=True)
class StateBytes:
    """What one rank needs whatever it is fed, in bytes.

    Attributes:
        weights, gradients, moments: of the parts it keeps.
        gathered: whole weights of embedding, output and one block, while a pass works with them; 0 where they are not
            shared by rows.
        owed: what copies have not sent yet, where they send less than all.
    """

    weights: int
    gradients: int
    moments: int
    gathered: int = 0
    owed: int = 0

    @property
    def total(self) -> int:
        """Their sum."""
        return self.weights + self.gradients + self.moments + self.gathered + self.owed


def state(shape: Model, dtype: str, optimizer: str, parallel: Parallel = _ONE_RANK, rank: int = 0) -> StateBytes:
    """Weights, gradients and moments of one rank.

    Args:
        shape: the [model] knobs.
        dtype: the compute type: weights are float32 under bfloat16.
        optimizer: `adamw` keeps two moments a weight; `muon` one for the matrices it has, which are the layers'.
        parallel: the layout. Copies (`dp_replicate`) do not make a rank's part smaller.
        rank: whose; the first has the most, since a remainder goes to the first ones.

    Not covered: a second block that is gathered while one works, whole gradients of two blocks or of embedding and output
    before they are scattered, and the flat copies in which gradients travel.
    """
    wide, exact = widths(dtype)
    block, rest = parts(shape, parallel, rank)
    matrices = shape.num_layers * sum(part.elements for part in block.values() if len(part.shape) > 1)
    count = sum(n * part.elements for n, some in ((shape.num_layers, block), (1, rest)) for part in some.values())
    moments = 2 * count - (matrices if optimizer == "muon" else 0)
    block_numbers, rest_numbers = gathered_numbers(shape, parallel, rank)
    gathered = block_numbers * wide + rest_numbers * exact if layout.size(parallel, "shard") > 1 else 0
    owed = count if parallel.dp_compress in ("topk", "onebit") else 0
    if parallel.dp_compress == "onebit":
        kept = (*list(block.values()) * shape.num_layers, *rest.values())
        mine = layout.coordinates(parallel, rank)["dp_replicate"]
        owed += sum(owned(part, parallel.dp_replicate, mine) for part in kept)
    return StateBytes(count * exact, count * exact, moments * exact, gathered, owed * exact)


def owned(part: Place, copies: int, rank: int) -> int:
    """Elements in the rows of a part that one of the copies owns, where they travel as signs."""
    rows = part.shape[0]
    return part.elements // max(1, rows) * len(layout.chunk(rows, copies, rank))


@dataclass(frozen=True)
class _Kept:
    """What a block keeps for its backward pass, in bytes.

    Attributes:
        input: of the block.
        attention: what the `attend` seam keeps besides queries, keys and values.
        rest: all else.
    """

    input: int
    attention: int
    rest: int

    def again(self, recompute: str) -> int:
        """What is not kept, and there only while the block is worked out again."""
        return {"none": 0, "attention": self.attention, "full": self.attention + self.rest}[recompute]

    @property
    def all(self) -> int:
        """Their sum."""
        return self.input + self.attention + self.rest


def _kept_by_block(shape: Model, dtype: str, tokens: int, parallel: Parallel) -> _Kept:
    """What a block keeps of a pass of so many tokens: the upper half of the table in :func:`activations`."""
    (wide, exact), t = widths(dtype), parallel.tp
    queries, pairs = shape.num_heads // t, max(1, shape.num_kv_heads // t)  # heads; of keys, and of values
    stream = tokens // t if parallel.sp else tokens
    entering = stream if parallel.sp_regather else tokens
    outputs = 1 if parallel.ring > 1 and parallel.ulysses == 1 and not parallel.sp else 2
    copies = max(0, parallel.ulysses - pairs)  # of keys, for ranks that read the same ones
    inside = (outputs - 1) * queries + 2 * copies
    heads = tokens * (2 * queries + 2 * pairs + shape.qk_norm * (queries + pairs)) * shape.head_dim
    hidden = (stream + 2 * entering) * shape.hidden_size + heads + tokens * 3 * shape.intermediate_size // t
    scales = 2 * stream + tokens * shape.qk_norm * (queries + pairs)
    multiplied = (2 * (queries + pairs) * shape.head_dim + 3 * shape.intermediate_size // t) * shape.hidden_size
    cast = multiplied * wide if wide < exact and layout.size(parallel, "shard") == 1 else 0
    return _Kept(
        input=stream * shape.hidden_size * wide,
        attention=tokens * (inside * shape.head_dim * wide + queries * exact),
        rest=hidden * wide + scales * exact + cast,
    )


def activations(
    shape: Model, dtype: str, sequences: int, length: int, parallel: Parallel = _ONE_RANK, rank: int = 0,
    recompute: str = "none", blocks: int = 0,
) -> int:  # fmt: skip
    """Bytes kept from the forward to the backward pass of one rank's micro-batch, dropout off, several documents a sample.

    In numbers a token that the rank, or its `tp`, has, one of t along `tp`: where `ring` and `ulysses` share sequences
    each has so many fewer; (e) in the compute type, (x) in float32 or above.
    Heads H of K channels, key/value heads G, of which a rank reads g = max(1, G / t).

    | kept                                             | t = 1   | tp        | sp        | sp, regather |
    |--------------------------------------------------|---------|-----------|-----------|--------------|
    | each block: its input, its second norm's (e)     | 2 D     | 2 D       | 2 D / t   | 2 D / t      |
    | both norms' outputs, as products take them (e)   | 2 D     | 2 D       | 2 D       | 2 D / t      |
    | queries, attention's output twice (e)            | 3 H K   | 3 H K / t | 3 H K / t | 3 H K / t    |
    | keys, values (e)                                 | 2 G K   | 2 g K     | 2 g K     | 2 g K        |
    | gate, up, their product (e)                      | 3 F     | 3 F / t   | 3 F / t   | 3 F / t      |
    | with qk_norm: queries and keys before it (e)     | H K+G K | H K/t+g K | H K/t+g K | H K/t+g K    |
    | with qk_norm: these norms' scales (x)            | H + G   | H / t + g | H / t + g | H / t + g    |
    | both norms' scales (x)                           | 2       | 2         | 2 / t     | 2 / t        |
    | attention's log-sum-exp (x)                      | H       | H / t     | H / t     | H / t        |
    | around: last norm's input, gradient for it (e)   | 2 D     | 2 D       | 2 D / t   | 2 D / t      |
    | last norm's scale (x)                            | 1       | 1         | 1 / t     | 1 / t        |
    | cosines and sines (float32)                      | K       | K         | K         | K            |

    Attention's output is there twice: document by document as attention needs it again, and joined (under sp: put in
    rank order; under ulysses: come back) as the next product does. Once under ring alone. Over ulysses a key/value head
    goes to every rank that reads it: keys, values are max(2 g K, 2 ulysses K). The norms' output shards under sp are let go: what is kept is gathered.
    And 9 bytes a token: its number, and whether it is learned or, under tp, is in this rank's part of the vocabulary.
    A pass, too, whatever it is fed: the gradient of the rank's rows of the output projection (x), and under bfloat16
    each weight as it was multiplied, but where those that share weights by rows gather them anew.

    Of the first `blocks`, `recompute` lets go of one of attention's outputs, that it needs again, and of its log-sum-exp
    (attention), or of all but a block's input (full; its weights as multiplied, too).

    Not covered: what one block works out again while the others wait, :func:`again`; gradients on their way.

    Source: Korthikanti et al. 2022 (arXiv 2205.05198) sections 4 and 5, its derivation done for this block.
    """
    (wide, exact), t = widths(dtype), parallel.tp
    tokens = sequences * length // layout.size(parallel, "sequence")
    stream = tokens // t if parallel.sp else tokens
    around = stream * (2 * shape.hidden_size * wide + exact)
    around += tokens * (BYTES["float32"] * shape.head_dim + 9)
    rows = len(layout.share(0, shape.vocab_size, t, layout.coordinates(parallel, rank)["tp"]))
    block = _kept_by_block(shape, dtype, tokens, parallel)
    kept = shape.num_layers * block.all - blocks * block.again(recompute)
    return kept + around + rows * shape.hidden_size * exact


def again(shape: Model, dtype: str, sequences: int, length: int, parallel: Parallel, recompute: str) -> int:
    """Bytes that one block works out again before its backward pass: at most so many beside :func:`activations`.

    Blocks do so one after the other, the last of them first; what lies behind them has been let go by then. Attention
    under sp puts queries, keys and values of several sequences in order, ulysses exchanges them, and has these copies
    again too; a ring has its output, which the next product has kept.
    """
    tokens = sequences * length // layout.size(parallel, "sequence")
    made = _kept_by_block(shape, dtype, tokens, parallel).again(recompute)
    queries, pairs = shape.num_heads // parallel.tp, max(1, shape.num_kv_heads // parallel.tp)
    if recompute == "attention" and parallel.ring > 1 and parallel.ulysses == 1 and not parallel.sp:
        made += tokens * queries * shape.head_dim * widths(dtype)[0]
    elif recompute == "attention" and (parallel.ulysses > 1 or (parallel.sp and sequences > 1)):
        made += tokens * (queries + 2 * pairs) * shape.head_dim * widths(dtype)[0]
    return made


def flops_per_token(shape: Model, sequence_length: int) -> int:
    """Operations of the model to learn from one token, forward and backward, recomputation not counted.

    Two a weight and token forward, four backward; the embedding is looked up, not multiplied. Attention is counted over
    the whole sequence, causal or not, as is usual for MFU. Source: Chowdhery et al. 2022 (arXiv 2204.02311) appendix B.
    """
    count = parameters(shape)
    multiplied = count["matrices"] + shape.vocab_size * shape.hidden_size
    attention = 12 * shape.num_layers * shape.num_heads * shape.head_dim * sequence_length
    return 6 * multiplied + attention
