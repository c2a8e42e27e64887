"""Bytes that a rank sends, by closed formula: what comm/collectives.py counts, told before a step is taken. No torch.

N is the bytes of a pass's residual stream: B sequences x S tokens x D hidden_size, in the compute type. A collective
over n ranks of a tensor of M bytes sends what :func:`outlast.layout.sent` says; an axis of one rank sends nothing.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from outlast import layout, settings
from outlast.config import Parallel, Run
from outlast.links import Choices
from outlast.places import Place
from outlast.plan import memory

LOGITS_AT_ONCE: Final = 1 << 23
"""As in outlast/model/loss.py, which cannot be imported here; a test holds them equal."""

FEWEST_ROWS: Final = 512
"""As in outlast/model/loss.py, too."""

_SMALL: Final = (3, 1, 1)
"""Numbers of 8 bytes that all ranks sum in a step: what is learned and fed (twice), the norm, the loss."""


@dataclass(frozen=True)
class Traffic:
    """What one rank does over one axis by one kind of collective.

    Attributes:
        calls: collectives it takes part in.
        bytes: it sends in them, headers not counted.
    """

    calls: int
    bytes: int


Totals = dict[tuple[str, str], Traffic]
"""By axis and operation, no pair without calls. Beside the grid's axes: `world`, all ranks, and where they are of more
than one axis those that :func:`outlast.layout.joint` names."""


@dataclass(frozen=True)
class _Transfer:
    """Equal collectives: `size` is the bytes of the whole tensor that each reduces, gathers or scatters.

    Of an all-to-all, whose parts are of any size, and of a shift, it is what this rank sends to others; of another, where
    `uneven`. Those that are `direct` go straight from rank to rank, whatever algorithms are in force: what travels under
    work, is coded, or is not summed. `even`: an all-to-all of equal parts. `wide` is 2 where 16-bit numbers are summed: on
    the way a sum has 32.
    """

    axis: str
    op: str
    size: int
    times: int = 1
    wide: int = 1
    uneven: bool = False
    direct: bool = False
    even: bool = False


def step(
    run: Run,
    sequences: Sequence[int],
    learned: Sequence[int],
    rank: int = 0,
    number: int | None = None,
    choices: Mapping[str, Choices] | None = None,
) -> Totals:
    """What one rank sends in a training step.

    Args:
        run: the settings, with compute type and vocabulary decided.
        sequences: in each of this rank's passes; 0 in those it makes only to keep up with the other data ranks.
        learned: targets learned in each of these passes, among the tokens that this rank has.
        rank: whose. Ranks differ by what they are fed, and where rows do not divide evenly.
        number: of the step, from 1; None: one after those that are exact, where copies send signs.
        choices: algorithms in force, by axis; none, the library's own.
    """
    return _added(run.parallel, _step(run, sequences, learned, rank, number), choices or {})


def by_choice(run: Run, rank: int = 0) -> list[tuple[str, str]]:
    """Axes and operations of a step for which an algorithm may be chosen: not those that all go straight."""
    counts = passes(run, rank)
    moved = _step(run, counts, [count * tokens_here(run) for count in counts], rank, None)
    chosen = (one for one in moved if one.times and not (one.direct or one.uneven or one.op == "shift"))
    return list(dict.fromkeys((layout.counted_as(run.parallel, one.axis), one.op) for one in chosen))


def _step(run: Run, sequences: Sequence[int], learned: Sequence[int], rank: int, number: int | None) -> list[_Transfer]:
    moved = [_Transfer("world", "all_reduce", 8 * numbers) for numbers in _SMALL]
    moved.append(_Transfer("world", "all_reduce", 8, direct=True))  # who asks to leave: the largest, no sum
    for count, targets in zip(sequences, learned, strict=True):
        moved += _stream(run, count, targets, rank, backward=True)
        moved += _attention(run, count, backward=True)
        moved += _shards(run, rank, forward=1, backward=1)
    apart = run.parallel.dp_compress == "onebit" and (number is None or number > run.parallel.dp_exact_steps)
    moved += _gradients(run, rank, apart)
    if apart:
        moved += _signs(run, rank)
    if run.optim.name == "muon":
        moved += _matrices(run, rank)
    return moved


def evaluation(
    run: Run,
    sequences: Sequence[int],
    learned: Sequence[int],
    rank: int = 0,
    choices: Mapping[str, Choices] | None = None,
) -> Totals:
    """What one rank sends in an evaluation: passes forward, and the sum of its losses. Arguments as of :func:`step`."""
    moved = [_Transfer("world", "all_reduce", 8 * 2)]
    for count, targets in zip(sequences, learned, strict=True):
        moved += _stream(run, count, targets, rank, backward=False)
        moved += _attention(run, count, backward=False)
    moved += _shards(run, rank, forward=len(sequences), backward=0)
    return _added(run.parallel, moved, choices or {})


def estimate(run: Run, rank: int = 0, choices: Mapping[str, Choices] | None = None) -> Totals:
    """What one rank sends in a step at most, as if every token were learned: it is known before any is read.

    Only the transfers of the loss depend on what is learned, and grow with it.
    """
    counts = passes(run, rank)
    return step(run, counts, [count * tokens_here(run) for count in counts], rank, choices=choices)


def tokens_here(run: Run) -> int:
    """Tokens that a rank, or the ranks of its `tp` together, has of each sequence."""
    return run.data.sequence_length // layout.size(run.parallel, "sequence")


def passes(run: Run, rank: int = 0) -> list[int]:
    """Sequences in each pass that a rank makes in a step, 0 in an empty one: every data rank makes as many passes."""
    ranks, mine = layout.data_rank(run.parallel, rank)
    batch, most = settings.batch_sequences(run), run.train.micro_batch
    fed = len(layout.share(0, batch, ranks, mine))
    return [max(0, min(most, fed - first)) for first in range(0, layout.passes(batch, most, ranks) * most, most)]


def total(totals: Totals, axis: str = "") -> int:
    """Bytes over one axis, or over all."""
    return sum(traffic.bytes for (over, _), traffic in totals.items() if axis in ("", over))


def _added(parallel: Parallel, moved: Iterable[_Transfer], choices: Mapping[str, Choices]) -> Totals:
    """Transfers as the ranks that there are send them."""
    totals: Totals = {}
    for one in moved:
        ranks, axis = layout.size(parallel, one.axis), layout.counted_as(parallel, one.axis)
        if ranks == 1 or not one.times:
            continue
        before = totals.get((axis, one.op), Traffic(0, 0))
        if axis in choices and not (one.direct or one.uneven) and (one.even or one.op not in ("all_to_all", "shift")):
            whole = one.size * ranks // (ranks - 1) if one.even else one.size
            each = choices[axis].sent(one.op, whole, one.wide)
        elif one.uneven or one.op in ("all_to_all", "shift"):
            each = one.size
        else:
            each = layout.sent(one.op, one.size, ranks)
        totals[axis, one.op] = Traffic(before.calls + one.times, before.bytes + one.times * each)
    return totals


def _stream(run: Run, count: int, targets: int, rank: int, backward: bool) -> Iterator[_Transfer]:
    """A pass over `tp`: the residual stream and its gradient, and what the parts of the vocabulary tell each other.

    Embedding, attention and feed-forward each leave a summand of the stream on every rank, and attention, feed-forward
    and loss each leave a summand of its gradient. An all-reduce sums these. Under sequence parallelism a reduce-scatter
    does, and an all-gather comes before each product and before each gradient that one needs whole. As an all-reduce is
    the one and the other, a block sends the same both ways: 8 N (t - 1) / t in a pass.

    A block that is recomputed in full does again in the backward pass what it did forward. But an all-reduce after the
    last product is made again only under dropout, whose mask lies behind it and is needed; under sequence parallelism
    product and reduce-scatter are one.

    Source: Korthikanti et al. 2022 (arXiv 2205.05198) section 4.2.2.
    """
    wide, exact = memory.widths(run.train.dtype)
    layers, tokens, code = run.model.num_layers, count * tokens_here(run), run.parallel.tp_compress
    row = layout.row_bytes(run.model.hidden_size, wide, code)
    whole = tokens * row
    entering, leaving = 2 * layers + 1, 1 + 2 * layers  # the blocks', and the loss; the embedding, and the blocks'
    anew = settings.recomputed(run) if backward and run.train.recompute == "full" else 0
    leaving_anew, summed_wide = anew * (2 if run.model.dropout or run.parallel.sp else 1), 2 if wide == 2 else 1
    if run.parallel.sp:
        coded, twice = code != "none", 2 if backward else 1
        pieces = coded or run.parallel.overlap > 1
        again = 2 * layers if backward and run.parallel.sp_regather else 0
        yield _Transfer("tp", "all_gather", whole, 2 * layers * twice + again + 2 * anew, direct=pieces)
        yield _Transfer("tp", "all_gather", whole, twice, direct=coded)  # the loss's, and the embedding's gradient
        yield _Transfer("tp", "reduce_scatter", whole, 2 * layers * twice + leaving_anew, summed_wide, direct=pieces)
        yield _Transfer("tp", "reduce_scatter", whole, twice, summed_wide, direct=coded)
    elif code == "none":
        yield _Transfer("tp", "all_reduce", whole, leaving + leaving_anew + (entering if backward else 0), summed_wide)
    else:  # each rank sums its share of the tokens, and hands it out
        tp, times = run.parallel.tp, leaving + leaving_anew + (entering if backward else 0)
        mine = len(layout.share(0, tokens, tp, layout.coordinates(run.parallel, rank)["tp"]))
        yield _Transfer("tp", "reduce_scatter", (tokens - mine) * row, times, uneven=True)
        yield _Transfer("tp", "all_gather", (tp - 1) * mine * row, times, uneven=True)
    # The log-sum-exp of each rank's logits, and the target's where it has it; so many tokens at a time as fit the rank
    # with the largest part of the vocabulary.
    rows = max(FEWEST_ROWS, LOGITS_AT_ONCE // len(layout.share(0, run.model.vocab_size, run.parallel.tp, 0)))
    for first in range(0, targets, rows):
        yield _Transfer("tp", "all_gather", 2 * min(rows, targets - first) * exact * run.parallel.tp)


def _attention(run: Run, count: int, backward: bool) -> Iterator[_Transfer]:
    """A pass over `ulysses` and `ring`.

    Ulysses: queries, keys and values of a rank's tokens go to the others by heads, and attention's output comes back;
    the gradients go the same ways. A key/value head goes to every rank that reads it.

    Ring: keys and values go R - 1 steps; backward once more, and their gradients, in float32 or 64, as many.

    A block that recomputes does again what it did forward; but attention alone is there again before its output goes back.

    Source: Jacobs et al. 2023 (arXiv 2309.14509) section 3.2; Liu et al. 2023 (arXiv 2310.01889) section 3.
    """
    wide, exact = memory.widths(run.train.dtype)
    ring, ulysses = run.parallel.ring, run.parallel.ulysses
    heads, pairs = (max(1, n // run.parallel.tp) for n in (run.model.num_heads, run.model.num_kv_heads))
    here, pairs = heads // ulysses, max(1, pairs // ulysses)  # of each rank, while it attends
    token, layers = count * tokens_here(run) * run.model.head_dim, run.model.num_layers
    anew = settings.recomputed(run) if backward and run.train.recompute != "none" else 0
    passes, back = (2 * layers, layers) if backward else (layers, 0)
    exchanged = token * (ulysses - 1) * wide
    yield _Transfer("ulysses", "all_to_all", exchanged * (here + 2 * pairs), passes + anew, even=True)
    back_anew = anew if run.train.recompute == "full" else 0
    yield _Transfer("ulysses", "all_to_all", exchanged * here, passes + back_anew, even=True)
    keys_and_values = token * ulysses * 2 * pairs
    yield _Transfer("ring", "shift", keys_and_values * wide, (passes + anew) * (ring - 1))
    yield _Transfer("ring", "shift", keys_and_values * exact, back * (ring - 1))


def _shards(run: Run, rank: int, forward: int, backward: int) -> Iterator[_Transfer]:
    """So many passes over the ranks that share weights by rows: blocks are gathered in the compute type, all else moves in float32 or 64.

    A block is gathered in each direction, and no more where it is recomputed: it is there for its backward pass by then.
    Embedding and output are gathered once and stay so until a backward pass or the evaluation ends.
    """
    wide, exact = memory.widths(run.train.dtype)
    block, rest = memory.gathered_numbers(run.model, run.parallel, rank)
    layers = run.model.num_layers
    yield _Transfer("shard", "all_gather", block * wide, layers * (forward + backward), direct=True)
    yield _Transfer("shard", "all_gather", rest * exact, backward or min(1, forward), direct=True)
    yield _Transfer("shard", "reduce_scatter", block * exact, layers * backward, direct=True)
    yield _Transfer("shard", "reduce_scatter", rest * exact, backward, direct=True)


def _gradients(run: Run, rank: int, apart: bool) -> Iterator[_Transfer]:
    """What is summed at the end of a step: over the ranks of each sum all vectors at once, and matrices a block at a time.

    Args:
        run: the settings.
        rank: whose.
        apart: the copies' gradients are not.
    """
    layers = run.model.num_layers
    for axis in layout.SUMMED:
        if apart and axis == "dp_replicate":
            continue
        block, rest = (
            {name: part for name, part in parts.items() if axis in layout.summed(name, run.model, run.parallel)}
            for parts in memory.parts(run.model, run.parallel, rank)
        )
        vectors = [part for part in (*list(block.values()) * layers, *rest.values()) if len(part.shape) == 1]
        matrices = [part for part in block.values() if len(part.shape) > 1]
        yield from _bucket(run, axis, vectors, 1)
        yield from _bucket(run, axis, matrices, layers)
        for part in rest.values():
            if len(part.shape) > 1:
                yield from _bucket(run, axis, [part], 1)


def _bucket(run: Run, axis: str, parts: Sequence[Place], times: int) -> Iterator[_Transfer]:
    """Gradients of n numbers in all, summed as one; over copies (R) as `dp_compress` says.

    bf16: n filled up to R equal stretches, 2 bytes each, scattered and gathered: half of an all-reduce in float32.
    topk: of every tensor its share, 4 bytes for the place and the number itself; what a rank sends grows with R - 1.
    """
    _, exact = memory.widths(run.train.dtype)
    copies, kind = run.parallel.dp_replicate, run.parallel.dp_compress if axis == "dp_replicate" else "none"
    count = sum(part.elements for part in parts)
    if parts and kind == "bf16":
        yield _Transfer(axis, "reduce_scatter", -(-count // copies) * copies * 2, times, 2)
        yield _Transfer(axis, "all_gather", -(-count // copies) * copies * 2, times)
    elif parts and kind == "topk":
        sent = sum(layout.largest(run.parallel.dp_topk, part.elements) for part in parts)
        yield _Transfer(axis, "all_gather", copies * sent * (4 + exact), times)
    elif parts:
        yield _Transfer(axis, "all_reduce", count * exact, times)


def _signs(run: Run, rank: int) -> Iterator[_Transfer]:
    """What 1-bit sends over copies, each the owner of some rows of every tensor.

    To every other copy the signs of its rows, eight a byte, and a scale a tensor; then to all those of what it made of
    its own rows, filled up to as many as the first has.
    """
    _, exact = memory.widths(run.train.dtype)
    block, rest = memory.parts(run.model, run.parallel, rank)
    parts = [*list(block.values()) * run.model.num_layers, *rest.values()]
    copies, mine = run.parallel.dp_replicate, layout.coordinates(run.parallel, rank)["dp_replicate"]
    owned = [sum(memory.owned(part, copies, copy) for part in parts) for copy in range(copies)]
    told = [-(-count // 8) + len(parts) * exact for count in owned]
    yield _Transfer("dp_replicate", "all_to_all", sum(told) - told[mine])
    yield _Transfer("dp_replicate", "all_gather", copies * told[0])


def _matrices(run: Run, rank: int) -> Iterator[_Transfer]:
    """What Muon sends: as many matrices at a time as ranks share the model, each put together on one and handed back."""
    _, exact = memory.widths(run.train.dtype)
    ranks = layout.size(run.parallel, "model")
    copy = layout.groups(run.parallel, "model")[0]  # copies split alike
    kept = [memory.parts(run.model, run.parallel, other)[0] for other in copy]
    shapes = layout.parameter_shapes(run.model)
    names = sorted((n for n in shapes if n.startswith("layers.") and len(shapes[n]) == 2), key=shapes.__getitem__)
    me = layout.coordinate(run.parallel, rank, "model")
    for first in range(0, len(names), ranks):
        taken = ["layers.0." + name.split(".", 2)[2] for name in names[first : first + ranks]]
        yield _Transfer(
            "model", "all_to_all", exact * sum(kept[me][n].elements for i, n in enumerate(taken) if i != me)
        )
        mine = taken[me] if me < len(taken) else ""
        back = sum(kept[other][mine].elements for other in range(ranks) if mine and other != me)
        yield _Transfer("model", "all_to_all", exact * back)
