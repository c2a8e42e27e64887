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
from outlast.plan import memory

LOGITS_AT_ONCE: Final = 1 << 23
"""As in outlast/model/loss.py, which cannot be imported here; a test holds them equal."""

FEWEST_ROWS: Final = 512
"""As in outlast/model/loss.py, too."""

_SMALL: Final = (3, 1, 1, 1)
"""Numbers of 8 bytes that all ranks sum in a step: what is learned and fed (twice), the norm, the loss, who asks to leave."""


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
"""By axis and operation, no pair without calls. Beside the grid's axes: `world`, all ranks; `model`, where both
`dp_shard` and `tp` share one copy of the model, the ranks of that copy."""


@dataclass(frozen=True)
class _Transfer:
    """Equal collectives: `size` is the bytes of the whole tensor that each reduces, gathers or scatters.

    Of an all-to-all, whose parts are of any size, it is what this rank sends to others. `wide` is 2 where 16-bit numbers
    are summed: on the way a sum has 32.
    """

    axis: str
    op: str
    size: int
    times: int = 1
    wide: int = 1


def step(
    run: Run,
    sequences: Sequence[int],
    learned: Sequence[int],
    rank: int = 0,
    choices: Mapping[str, Choices] | None = None,
) -> Totals:
    """What one rank sends in a training step.

    Args:
        run: the settings, with compute type and vocabulary decided.
        sequences: in each of this rank's passes; 0 in those it makes only to keep up with the other data ranks.
        learned: targets learned in each of these passes.
        rank: whose. Ranks differ by what they are fed, and where rows do not divide evenly.
        choices: algorithms in force, by axis; none, the library's own.
    """
    moved = [_Transfer("world", "all_reduce", 8 * numbers) for numbers in _SMALL]
    for count, targets in zip(sequences, learned, strict=True):
        moved += _stream(run, count, targets, backward=True)
        moved += _shards(run, rank, forward=1, backward=1)
    moved += _gradients(run, rank)
    if run.optim.name == "muon":
        moved += _matrices(run, rank)
    return _added(run.parallel, moved, choices or {})


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
        moved += _stream(run, count, targets, backward=False)
    moved += _shards(run, rank, forward=len(sequences), backward=0)
    return _added(run.parallel, moved, choices or {})


def estimate(run: Run, rank: int = 0, choices: Mapping[str, Choices] | None = None) -> Totals:
    """What one rank sends in a step at most, as if every token were learned: it is known before any is read.

    Only the transfers of the loss depend on what is learned, and grow with it.
    """
    counts = passes(run, rank)
    return step(run, counts, [count * run.data.sequence_length for count in counts], rank, choices)


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
    ranks = layout.degrees(parallel) | {"world": layout.ranks(parallel), "model": parallel.dp_shard * parallel.tp}
    totals: Totals = {}
    for one in moved:
        if ranks[one.axis] == 1 or not one.times:
            continue
        before = totals.get((one.axis, one.op), Traffic(0, 0))
        if one.op == "all_to_all":
            each = one.size
        elif one.axis in choices:
            each = choices[one.axis].sent(one.op, one.size, one.wide)
        else:
            each = layout.sent(one.op, one.size, ranks[one.axis])
        totals[one.axis, one.op] = Traffic(before.calls + one.times, before.bytes + one.times * each)
    return totals


def _stream(run: Run, count: int, targets: int, backward: bool) -> Iterator[_Transfer]:
    """A pass over `tp`: the residual stream and its gradient, and what the parts of the vocabulary tell each other.

    Embedding, attention and feed-forward each leave a summand of the stream on every rank, and attention, feed-forward
    and loss each leave a summand of its gradient. An all-reduce sums these. Under sequence parallelism a reduce-scatter
    does, and an all-gather comes before each product and before each gradient that one needs whole. As an all-reduce is
    the one and the other, a block sends the same both ways: 8 N (t - 1) / t in a pass.

    Source: Korthikanti et al. 2022 (arXiv 2205.05198) section 4.2.2.
    """
    wide, exact = memory.widths(run.train.dtype)
    layers, whole = run.model.num_layers, count * run.data.sequence_length * run.model.hidden_size * wide
    entering, leaving = 2 * layers + 1, 1 + 2 * layers  # the blocks', and the loss; the embedding, and the blocks'
    if run.parallel.sp:
        again = 2 * layers if run.parallel.sp_regather else 0
        yield _Transfer("tp", "all_gather", whole, entering + (leaving + again if backward else 0))
        yield _Transfer("tp", "reduce_scatter", whole, leaving + (entering if backward else 0), 2 if wide == 2 else 1)
    else:
        yield _Transfer("tp", "all_reduce", whole, leaving + (entering if backward else 0), 2 if wide == 2 else 1)
    # The log-sum-exp of each rank's logits, and the target's where it has it; so many tokens at a time as fit the rank
    # with the largest part of the vocabulary.
    rows = max(FEWEST_ROWS, LOGITS_AT_ONCE // len(layout.share(0, run.model.vocab_size, run.parallel.tp, 0)))
    for first in range(0, targets, rows):
        yield _Transfer("tp", "all_gather", 2 * min(rows, targets - first) * exact * run.parallel.tp)


def _shards(run: Run, rank: int, forward: int, backward: int) -> Iterator[_Transfer]:
    """So many passes over `dp_shard`: blocks are gathered in the compute type, all else moves in float32 or 64.

    A block is gathered in each direction. Embedding and output are gathered once and stay so until a backward pass or
    the evaluation ends.
    """
    wide, exact = memory.widths(run.train.dtype)
    block, rest = memory.gathered_numbers(run.model, run.parallel, rank)
    layers = run.model.num_layers
    yield _Transfer("dp_shard", "all_gather", block * wide, layers * (forward + backward))
    yield _Transfer("dp_shard", "all_gather", rest * exact, backward or min(1, forward))
    yield _Transfer("dp_shard", "reduce_scatter", block * exact, layers * backward)
    yield _Transfer("dp_shard", "reduce_scatter", rest * exact, backward)


def _gradients(run: Run, rank: int) -> Iterator[_Transfer]:
    """What is summed at the end of a step: over each axis all vectors at once, and matrices a block at a time."""
    _, exact = memory.widths(run.train.dtype)
    layers = run.model.num_layers
    for axis in layout.AXES:
        block, rest = (
            {name: part for name, part in parts.items() if axis in layout.summed(name, run.model, run.parallel)}
            for parts in memory.parts(run.model, run.parallel, rank)
        )
        vectors = [part.elements for part in (*list(block.values()) * layers, *rest.values()) if len(part.shape) == 1]
        matrices = [part.elements for part in block.values() if len(part.shape) > 1]
        if vectors:
            yield _Transfer(axis, "all_reduce", sum(vectors) * exact)
        if matrices:
            yield _Transfer(axis, "all_reduce", sum(matrices) * exact, layers)
        for part in rest.values():
            if len(part.shape) > 1:
                yield _Transfer(axis, "all_reduce", part.elements * exact)


def _matrices(run: Run, rank: int) -> Iterator[_Transfer]:
    """What Muon sends: as many matrices at a time as ranks share the model, each put together on one and handed back."""
    _, exact = memory.widths(run.train.dtype)
    ranks = run.parallel.dp_shard * run.parallel.tp
    axis = "dp_shard" if run.parallel.tp == 1 else "tp" if run.parallel.dp_shard == 1 else "model"
    kept = [memory.parts(run.model, run.parallel, other)[0] for other in range(ranks)]  # copies split alike
    shapes = layout.parameter_shapes(run.model)
    names = sorted((n for n in shapes if n.startswith("layers.") and len(shapes[n]) == 2), key=shapes.__getitem__)
    me = rank % ranks
    for first in range(0, len(names), ranks):
        taken = ["layers.0." + name.split(".", 2)[2] for name in names[first : first + ranks]]
        yield _Transfer(axis, "all_to_all", exact * sum(kept[me][n].elements for i, n in enumerate(taken) if i != me))
        mine = taken[me] if me < len(taken) else ""
        back = sum(kept[other][mine].elements for other in range(ranks) if mine and other != me)
        yield _Transfer(axis, "all_to_all", exact * back)
