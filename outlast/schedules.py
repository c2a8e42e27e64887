"""Who sends what to whom in which round, for each algorithm of each collective. No torch.

A schedule is worked through by :mod:`outlast.comm.algorithms`, and :mod:`outlast.links` tells its time and its bytes: what
is predicted, what is counted and what is done are the same list.

Source: Chan et al. 2007, "Collective communication: theory, practice, and experience" (ring, tree, halving-doubling);
    Thakur et al. 2005, "Optimization of collective communication operations in MPICH" (any number of ranks, pairwise
    exchange); Rabenseifner 2004, "Optimization of collective reduction operations"; Bruck et al. 1997 (all-to-all in
    few rounds).
"""

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

Op = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
Algorithm = Literal["library", "direct", "ring", "halving", "tree", "hierarchical"]

ALGORITHMS: Final[dict[str, tuple[Algorithm, ...]]] = {
    "all_reduce": ("direct", "ring", "halving", "tree", "hierarchical"),
    "all_gather": ("direct", "ring", "halving", "hierarchical"),
    "reduce_scatter": ("direct", "ring", "halving", "hierarchical"),
    "all_to_all": ("direct", "ring", "halving", "hierarchical"),
}
"""Those there are beside the library's own. A tree carries everything to one rank and back, which gains only where all want
the same."""

_UNIT: Final = 64
"""Bytes: what is cut anywhere is cut at a multiple, so that no number of any type is cut in two."""


@dataclass(frozen=True)
class Move:
    """A message.

    Attributes:
        sender, receiver: ranks.
        first, stop: bytes of the whole that it carries. Of an all-to-all the whole is all ranks' parts, by who sends them
            and then by who gets them; those from one rank to another in a round are one message.
        adds: the receiver adds it to its own, rather than put it in its place.
        summed: it carries a sum, not just what its sender brought: of 16-bit types, sums travel in 32.
    """

    sender: int
    receiver: int
    first: int
    stop: int
    adds: bool = False
    summed: bool = False

    @property
    def bytes(self) -> int:
        """That it carries, 16-bit sums not widened."""
        return self.stop - self.first


Round = tuple[Move, ...]
Span = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Schedule:
    """A collective, round by round: a rank begins the next when it has what it receives in this one.

    Attributes:
        rounds: their messages. Of several between the same two ranks in a round, the order is that of the list.
        owned: of each rank, the stretches whose whole sum is first known there.
    """

    rounds: tuple[Round, ...]
    owned: tuple[tuple[Span, ...], ...]

    @functools.cached_property
    def adds(self) -> bool:
        """Whether anything is summed."""
        return any(move.adds for moves in self.rounds for move in moves)

    def of(self, rank: int) -> list[tuple[Round, Round]]:
        """What a rank receives and what it sends, in each round in which it does; worked out once."""
        if rank not in self._of:
            both = (
                (tuple(m for m in moves if m.receiver == rank), tuple(m for m in moves if m.sender == rank))
                for moves in self.rounds
            )
            self._of[rank] = [one for one in both if any(one)]
        return self._of[rank]

    @functools.cached_property
    def _of(self) -> dict[int, list[tuple[Round, Round]]]:
        return {}


@dataclass(frozen=True)
class Group:
    """The ranks that take part.

    Attributes:
        hosts: number of the host that each is on.
        order: the ranks, those with the fastest links first, the ranks of a host together; a tree has its root there and
            its leaves at the end, and a ring goes that way around.
    """

    hosts: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many ranks."""
        return len(self.hosts)

    def by_host(self) -> list[list[int]]:
        """The ranks of each host."""
        return [[r for r in range(self.size) if self.hosts[r] == host] for host in sorted(set(self.hosts))]


@functools.lru_cache(maxsize=256)  # asked for in every collective of a step
def schedule(op: str, algorithm: str, size: int, group: Group, segments: int = 1) -> Schedule:
    """The messages of one collective.

    Args:
        op: which; an all-to-all whose parts are all of one size.
        algorithm: one of ALGORITHMS of the op.
        size: bytes of the whole: of what is reduced, of all parts together, of what a rank hands out.
        group: who takes part.
        segments: that a tree sends one after the other; others do not cut.

    Raises:
        ValueError: there is no such algorithm for it, or size is no whole number of parts.
    """
    if algorithm not in ALGORITHMS[op]:
        raise ValueError(f"{op} is not made by {algorithm}: one of {', '.join(ALGORITHMS[op])}")
    if op != "all_reduce" and size % group.size:
        raise ValueError(f"{op}: {size} bytes are no {group.size} parts of the same size")
    if op == "all_to_all":
        rounds = _all_to_all(algorithm, size // group.size, group)
        return _finished([sorted(moves, key=_pair) for moves in rounds], {}, group.size)
    if algorithm == "tree":
        return _finished(*_tree(size, group, segments), group.size)
    owners = _owners(algorithm, group) if op == "all_reduce" else list(range(group.size))
    cuts = _cuts(size, len(owners)) if op == "all_reduce" else [size // group.size * i for i in range(group.size + 1)]
    parts = {rank: (cuts[i], cuts[i + 1]) for i, rank in enumerate(owners)}
    match algorithm:
        case "direct":
            scatter, summed = _direct(parts, group), _each(parts)
        case "ring":
            scatter, summed = _ring(parts, group), _each(parts)
        case "halving":
            scatter, summed = _halving(parts, group)
        case _:
            scatter, summed = _hierarchical(parts, group)
    rounds: list[list[Move]] = []
    if op != "all_gather":
        rounds += scatter
    if op != "reduce_scatter":
        rounds += [_turned(moves, parts) for moves in reversed(scatter)]
    return _finished(rounds, summed, group.size)


def _pair(move: Move) -> tuple[int, int]:
    return move.sender, move.receiver


def _owners(algorithm: str, group: Group) -> list[int]:
    """Who sums a part of what an all-reduce reduces, in the order of the parts."""
    if algorithm == "halving":
        return _survivors(group.size)
    if algorithm == "hierarchical":
        hosts = group.by_host()
        return [host[lane] for lane in range(min(map(len, hosts))) for host in hosts]
    return list(range(group.size))


def _cuts(size: int, parts: int) -> list[int]:
    """Where a whole is cut into parts of whole units, as equal as can be."""
    units = -(-size // _UNIT)
    return [min(size, units * i // parts * _UNIT) for i in range(parts + 1)]


def _each(parts: dict[int, Span]) -> dict[int, list[Span]]:
    """Every part is summed where it belongs."""
    return {rank: [span] for rank, span in parts.items()}


def _merged(spans: Iterable[Span]) -> list[Span]:
    """Stretches in order, those that touch made one; empty ones left out."""
    merged: list[Span] = []
    for first, stop in sorted(span for span in spans if span[0] < span[1]):
        if merged and merged[-1][1] == first:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((first, stop))
    return merged


def _turned(moves: Sequence[Move], parts: dict[int, Span]) -> list[Move]:
    """A round of a reduce-scatter run backwards: what was sent as a summand comes back as a result.

    A rank is not sent its own part, which it had first.
    """
    turned = []
    for move in moves:
        first, stop = parts.get(move.sender, (move.stop, move.stop))
        for span in ((move.first, min(first, move.stop)), (max(stop, move.first), move.stop)):
            if span[0] < span[1]:
                turned.append(Move(move.receiver, move.sender, *span))
    return turned


def _finished(rounds: Sequence[Sequence[Move]], summed: dict[int, list[Span]], ranks: int) -> Schedule:
    """Drop what carries nothing, and mark what carries sums: all that a rank sends to be added once it has added."""
    added: set[int] = set()
    marked = []
    for moves in rounds:
        kept = [replace(m, summed=m.adds and m.sender in added) for m in moves if m.bytes and m.sender != m.receiver]
        added |= {move.receiver for move in kept if move.adds}
        if kept:
            marked.append(tuple(kept))
    return Schedule(tuple(marked), tuple(tuple(summed.get(rank, ())) for rank in range(ranks)))


# The four that follow are reduce-scatters: each rank ends with the sum of its part. Backwards they are all-gathers.


def _direct(parts: dict[int, Span], group: Group) -> list[list[Move]]:
    """Everyone sends everyone its part at once: one round."""
    n = group.size
    return [[Move(r, to, *parts[to], adds=True) for step in range(1, n) for r in range(n) for to in [(r + step) % n]]]


def _ring(parts: dict[int, Span], group: Group) -> list[list[Move]]:
    """N - 1 rounds in which a part goes one rank on, and grows by what that one has."""
    around, n = group.order, group.size
    return [
        [Move(around[p], around[(p + 1) % n], *parts[around[(p - step - 1) % n]], adds=True) for p in range(n)]
        for step in range(n - 1)
    ]


def _survivors(n: int) -> list[int]:
    """The ranks that halve: a power of two; each of the first so many even ones also stands for the odd one after it."""
    power = 1 << n.bit_length() - 1
    folded = n - power
    return [2 * i for i in range(folded)] + list(range(2 * folded, n))


def _halving(parts: dict[int, Span], group: Group) -> tuple[list[list[Move]], dict[int, list[Span]]]:
    """log2(n) rounds in which each rank sends half of what it still has to the one on the other side, and adds what comes.

    Where n is no power of two, some ranks first hand all they have to the one before them, and get their part from it at
    the end.
    """
    survivors = _survivors(group.size)
    folded = sorted(set(range(group.size)) - set(survivors))
    whole = (min(first for first, _ in parts.values()), max(stop for _, stop in parts.values()))
    rounds = [[Move(r, r - 1, *whole, adds=True) for r in folded]]
    summed = {r: [parts[q] for q in (r, r + 1) if q == r or (q in folded and q in parts)] for r in survivors}
    starts = [summed[r][0][0] for r in survivors] + [whole[1]]
    distance = len(survivors) // 2
    while distance:
        moves = []
        for i, rank in enumerate(survivors):
            first = (i ^ distance) // distance * distance
            moves.append(Move(rank, survivors[i ^ distance], starts[first], starts[first + distance], adds=True))
        rounds.append(moves)
        distance //= 2
    rounds.append([Move(r - 1, r, *parts[r]) for r in folded if r in parts])
    return rounds, summed


def _hierarchical(parts: dict[int, Span], group: Group) -> tuple[list[list[Move]], dict[int, list[Span]]]:
    """Sum inside each host, then between hosts: each byte crosses once for each other host.

    As many lanes as the smallest host has ranks, so that all of these send; a lane's owner on a host sums it there. The
    parts of ranks beyond, on larger hosts, go with the lanes in turn.
    """
    hosts = group.by_host()
    lanes = min(map(len, hosts))
    of_lane = [[[parts[r] for r in host[lane::lanes] if r in parts] for host in hosts] for lane in range(lanes)]
    inside, between, handed = [], [], []
    summed: dict[int, list[Span]] = {}
    for lane in range(lanes):
        everything = _merged(span for spans in of_lane[lane] for span in spans)
        for h, host in enumerate(hosts):
            owner = host[lane]
            summed[owner] = of_lane[lane][h]
            inside += [Move(r, owner, *span, adds=True) for r in host if r != owner for span in everything]
            for step in range(1, len(hosts)):
                to = (h + step) % len(hosts)
                between += [Move(owner, hosts[to][lane], *span, adds=True) for span in _merged(of_lane[lane][to])]
            handed += [Move(owner, r, *parts[r]) for r in host[lane::lanes] if r != owner and r in parts]
    return [inside, between, handed], summed


def _tree(size: int, group: Group, segments: int) -> tuple[list[list[Move]], dict[int, list[Span]]]:
    """Up a binary tree, added on the way, and down again, a segment after another: 2 depth + segments - 1 rounds."""
    at, depths = group.order, [(p + 1).bit_length() - 1 for p in range(group.size)]
    deepest, cuts = depths[-1], _cuts(size, segments)
    rounds: list[list[Move]] = [[] for _ in range(2 * deepest + segments - 1)]
    for s, span in enumerate(itertools.pairwise(cuts)):
        for p in range(1, group.size):
            parent = at[(p - 1) // 2]
            rounds[deepest - depths[p] + s].append(Move(at[p], parent, *span, adds=True))
            rounds[deepest + depths[p] - 1 + s].append(Move(parent, at[p], *span))
    return rounds, {at[0]: list(itertools.pairwise(cuts))}


def _all_to_all(algorithm: str, part: int, group: Group) -> list[list[Move]]:
    """Each rank's part for each other, straight there or by way of others.

    `ring` pairs ranks at distance 1, 2, ...: one partner at a time. `halving` sends, in log2(n) rounds, all that has to go
    further by 1, 2, 4, ...: fewer messages, more bytes. `hierarchical` sends one message from each host to each other.
    """
    n = group.size
    hosts = group.by_host()
    rounds: list[list[Move]] = [[] for _ in range(max(n, 3))]
    for step, sender in itertools.product(range(1, n), range(n)):
        receiver = (sender + step) % n
        span = ((sender * n + receiver) * part, (sender * n + receiver + 1) * part)
        match algorithm:
            case "direct":
                rounds[0].append(Move(sender, receiver, *span))
            case "ring":
                rounds[step - 1].append(Move(sender, receiver, *span))
            case "halving":
                for bit in range(step.bit_length()):
                    if step >> bit & 1:
                        here = (sender + step % (1 << bit)) % n
                        rounds[bit].append(Move(here, (here + (1 << bit)) % n, *span))
            case _:
                (a, mine), (b, theirs) = (
                    next((h, host) for h, host in enumerate(hosts) if rank in host) for rank in (sender, receiver)
                )
                if a == b:
                    rounds[0].append(Move(sender, receiver, *span))
                else:
                    leaves, enters = mine[b % len(mine)], theirs[a % len(theirs)]
                    for at, (here, there) in enumerate(itertools.pairwise((sender, leaves, enters, receiver))):
                        rounds[at].append(Move(here, there, *span))
    return rounds
