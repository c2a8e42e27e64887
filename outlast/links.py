"""How long a collective takes over given links, by algorithm, and which algorithm to take. No torch.

A link is a host's interface: what its ranks send to other hosts shares it in one direction, what they receive in the
other. A round of m messages, of which the busiest rank has k, takes

    latency + (m - 1) together + (k - 1) message + the longest of (bytes through a link - free)/ its rate + bytes added / sums

and a collective the sum of its rounds. `together` is what ranks cost one another that share a machine's cores; `free` bytes are
through while the latency passes, which is how a shaped link catches up. A link
with three messages or more the same way at once, several of them one rank's, loses `crowded` seconds besides, by its bytes. For n ranks on n hosts with equal links that comes to the formulas of the papers:
with a = latency, b = 1 / rate and M bytes, an all-reduce by ring takes 2 (n - 1) a + 2 (n - 1)/n M b, by halving
2 log2(n) a + 2 (n - 1)/n M b, directly 2 a + 2 (n - 1)/n M b and the messages, by a tree of depth d in s segments
(2 d + s - 1) a + 2 d' M b / s where d' counts the segments in its busiest rank's link.

Source: Hockney 1994 (latency and rate); Chan et al. 2007 table 1, Thakur et al. 2005 section 4.
"""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from outlast.errors import OutlastError, UsageError
from outlast.records import read_json, write_json
from outlast.schedules import ALGORITHMS, Algorithm, Group, Move, schedule

VERSION: Final = 1
_MOST_SEGMENTS: Final = 256
_TIED: Final = 1.02
"""Times that are no further apart count as the same."""
_BETTER: Final = 0.95
"""Another algorithm than the library's is taken where it is to need less than this share of its time."""


@dataclass(frozen=True)
class Library:
    """What the library's own collective took, measured.

    Attributes:
        op: which.
        hosts: host of each rank that took part.
        points: bytes of the whole, and seconds; bytes rising.
    """

    op: str
    hosts: tuple[int, ...]
    points: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Profile:
    """The links of a run.

    Attributes:
        hosts: number of the host that each rank of the run is on, from 0, in the order of their first ranks.
        inside, between: seconds until an empty message is there, on the same host and from another.
        inside_rate: bytes/s that each rank sends to others on its host.
        rates: bytes/s in each direction of each host's interface; one for each host.
        message: seconds that each message but the first costs a rank that has several in a round.
        together: seconds that each message of a round but the first costs all, whoever's it is.
        free: bytes that a host's link carries in each round before its rate counts.
        crowded: seconds that a link loses with three messages or more the same way at once, several of them one rank's, by
            the link's bytes, which rise. Between two a line is drawn; beyond the last it is what it was there.
        sums: bytes/s that a rank adds.
        library: what is known of the library's own. Where nothing is, an all-reduce is taken for a ring, all else for
            direct.
    """

    hosts: tuple[int, ...]
    inside: float
    inside_rate: float
    between: float
    rates: tuple[float, ...]
    message: float = 0.0
    together: float = 0.0
    free: float = 0.0
    crowded: tuple[tuple[int, float], ...] = ()
    sums: float = math.inf
    library: tuple[Library, ...] = ()

    def group(self, ranks: Sequence[int]) -> Group:
        """Some of the run's ranks, as they take part in a collective."""
        hosts = tuple(self.hosts[rank] for rank in ranks)
        return Group(hosts, tuple(sorted(range(len(ranks)), key=lambda r: (-self.rates[hosts[r]], hosts[r], r))))


@dataclass(frozen=True)
class Choice:
    """An algorithm, in how many segments, and the seconds it is to take."""

    algorithm: Algorithm
    seconds: float
    segments: int = 1


def seconds(op: str, algorithm: str, size: int, group: Group, profile: Profile, wide: int = 1, segments: int = 1) -> float:  # fmt: skip
    """How long a collective takes.

    Args:
        op: as of :func:`outlast.schedules.schedule`.
        algorithm: as there, or `library`.
        size: bytes of the whole, as there; where parts are of one size, the next that has such.
        group: as there.
        profile: the links.
        wide: how many times its bytes a sum has on its way: 2 for 16-bit types, which are summed in 32.
        segments: of a tree.
    """
    if algorithm == "library":
        for known in profile.library:
            if known.op == op and known.hosts == group.hosts:
                return _between_points(known.points, size)
        algorithm = "ring" if op == "all_reduce" else "direct"
    whole = size if op == "all_reduce" else -(-size // group.size) * group.size
    rounds = schedule(op, algorithm, whole, group, segments).rounds
    return sum(_round(moves, group, profile, wide) for moves in rounds)


def _round(moves: Sequence[Move], group: Group, profile: Profile, wide: int) -> float:
    """Seconds of one round."""
    links, own, added, most = (Counter[tuple[str, int]]() for _ in range(4))
    peers: dict[tuple[str, int, int], set[int]] = {}
    for move in moves:
        size, here, there = (
            move.bytes * (wide if move.summed else 1),
            group.hosts[move.sender],
            group.hosts[move.receiver],
        )
        for way, rank, host, peer in (
            ("out", move.sender, here, move.receiver),
            ("in", move.receiver, there, move.sender),
        ):
            most[way, rank] += 1
            if here == there:
                own[way, rank] += size
            else:
                links[way, host] += size
                peers.setdefault((way, host, rank), set()).add(peer)
        if move.adds:
            added["", move.receiver] += move.bytes
    several = {at[:2] for at, those in peers.items() if len(those) > 1} if profile.crowded else set()
    crowded = {at for at in several if sum(len(those) for by, those in peers.items() if by[:2] == at) > 2}
    across = [
        max(0.0, size - profile.free) / profile.rates[at[1]]
        + (_between_points(profile.crowded, min(size, profile.crowded[-1][0])) if at in crowded else 0.0)
        for at, size in links.items()
    ]
    return (
        (profile.between if links else profile.inside)
        + profile.together * (len(moves) - 1)
        + profile.message * (max(most.values()) - 1)
        + max(*across, 0.0, max(own.values(), default=0) / profile.inside_rate)
        + max(added.values(), default=0) / profile.sums
    )


def _between_points(points: Sequence[tuple[int, float]], size: int) -> float:
    """Seconds on a line through the two nearest measured; beyond the last, on the same one, though not below 0."""
    if size <= points[0][0] or len(points) == 1:
        return points[0][1]
    (low, fast), (high, slow) = next(
        ((a, b) for a, b in itertools.pairwise(points) if size <= b[0]), (points[-2], points[-1])
    )
    return max(0.0, fast + (slow - fast) * (size - low) / (high - low))


def best_segments(size: int, group: Group, profile: Profile) -> int:
    """Into how many segments a tree best cuts: s rounds and 2 d - 1 more of a + b M/s each, so sqrt((2 d - 1) b M / a)."""
    extra = 2 * (group.size.bit_length() - 1) - 1
    whole = [move for moves in schedule("all_reduce", "tree", size, group).rounds for move in moves]
    if not whole or extra < 1:
        return 1
    full, empty = (
        _round(whole, group, profile, 1),
        _round([dataclasses.replace(m, first=0, stop=0) for m in whole], group, profile, 1),
    )
    return max(1, min(_MOST_SEGMENTS, round(math.sqrt(extra * (full - empty) / empty)))) if empty else _MOST_SEGMENTS


def choose(op: str, size: int, group: Group, profile: Profile, wide: int = 1) -> Choice:
    """The algorithm that is to take the least time; the library's, unless another is to be clearly faster.

    Arguments as of :func:`seconds`.
    """
    library = Choice("library", seconds(op, "library", size, group, profile, wide))
    found = [library]
    for algorithm in ALGORITHMS[op]:
        segments = best_segments(size, group, profile) if algorithm == "tree" else 1
        found.append(Choice(algorithm, seconds(op, algorithm, size, group, profile, wide, segments), segments))
    least = min(choice.seconds for choice in found)
    best = next(choice for choice in found if choice.seconds <= _TIED * least)  # of those alike, the simplest
    return best if best.seconds < _BETTER * library.seconds else library


def sent(op: str, algorithm: str, size: int, group: Group, rank: int, wide: int = 1) -> int:
    """Bytes that one rank sends in a collective: exactly. Arguments as of :func:`seconds`."""
    if algorithm == "library":
        return size * (group.size - 1) // group.size * (2 if op == "all_reduce" else 1)
    rounds = schedule(op, algorithm, size, group).rounds  # in segments, a tree sends no more
    return sum(m.bytes * (wide if m.summed else 1) for moves in rounds for m in moves if m.sender == rank)


@dataclass
class Choices:
    """What the ranks along one axis take for each collective.

    Attributes:
        profile: the links; the same on every rank.
        group: the ranks of the axis.
        rank: this one, of these.
        made: what was chosen so far, by collective, size and width of its sums.
    """

    profile: Profile
    group: Group
    rank: int
    made: dict[tuple[str, int, int], Choice] = field(default_factory=dict, repr=False)

    def of(self, op: str, size: int, wide: int = 1) -> Choice:
        """The choice for a size: made once for all up to the next power of two."""
        key = (op, 1 << max(0, size - 1).bit_length(), wide)
        if key not in self.made:
            self.made[key] = choose(*key[:2], self.group, self.profile, wide)
        return self.made[key]

    def sent(self, op: str, size: int, wide: int = 1) -> int:
        """Bytes that this rank then sends."""
        return sent(op, self.of(op, size, wide).algorithm, size, self.group, self.rank, wide)

    @property
    def crosses(self) -> bool:
        """Whether its ranks are on several hosts."""
        return len(set(self.group.hosts)) > 1

    def table(self, op: str, sizes: Sequence[int]) -> list[tuple[int, Choice]]:
        """Up to how many bytes which choice is taken: one entry for each stretch of sizes with the same algorithm."""
        rows: list[tuple[int, Choice]] = []
        for size in sizes:
            choice = self.of(op, size)
            if rows and rows[-1][1].algorithm == choice.algorithm:
                rows.pop()
            rows.append((size, choice))
        return rows


def write(path: Path, profile: Profile, names: Sequence[str] = ()) -> None:
    """Keep a profile; the names of its hosts beside it, for who reads it. Raises StorageError."""
    write_json(path, "links", VERSION, {"names": list(names), **dataclasses.asdict(profile)})


def read(path: Path) -> Profile:
    """Read a profile.

    Raises:
        OutlastError: it is not there, is another record, or has something in it that cannot be.
    """
    try:
        told = read_json(path, "links", VERSION)
    except OutlastError as error:
        raise _bad(path, error.what) from None
    try:
        library = tuple(
            Library(str(one["op"]), tuple(map(int, one["hosts"])), tuple((int(b), float(s)) for b, s in one["points"]))
            for one in told.get("library", ())
        )
        numbers = {name: float(told[name]) for name in ("inside", "inside_rate", "between")}
        numbers |= {name: float(told[name]) for name in ("message", "together", "free", "sums") if name in told}
        crowded = tuple((int(size), float(lost)) for size, lost in told.get("crowded", ()))
        profile = Profile(
            tuple(told["hosts"]), rates=tuple(map(float, told["rates"])), crowded=crowded, library=library, **numbers
        )
    except (KeyError, TypeError, ValueError) as error:
        missing = isinstance(error, KeyError)
        raise _bad(
            path, f"it has no {error}" if missing else f"a value of another kind than it should be: {error}"
        ) from None
    _check(path, profile)
    return profile


def _bad(path: Path, why: str) -> OutlastError:
    return UsageError(
        f"cannot use the links record: {why}",
        fix='measure anew (parallel.links = "measure"), or mend it by hand: seconds, and bytes/s above 0',
        where=str(path),
        key="parallel.links",
    )


def _check(path: Path, profile: Profile) -> None:
    """Refuse numbers that no link has."""
    facts: dict[str, Any] = dataclasses.asdict(profile)
    for name in ("inside", "between", "message", "together", "free"):
        if not 0 <= facts[name] < math.inf:
            raise _bad(path, f"{name} is {facts[name]}, and seconds and bytes are 0 or more")
    for name in ("inside_rate", "sums"):
        if not facts[name] > 0:
            raise _bad(path, f"{name} is {facts[name]}, and bytes/s are above 0")
    if [size for size, _ in profile.crowded] != sorted({size for size, _ in profile.crowded}):
        raise _bad(path, f"crowded has {list(map(list, profile.crowded))}: rising bytes are wanted")
    hosts = sorted(set(profile.hosts))
    if not hosts or hosts != list(range(len(hosts))):
        raise _bad(path, f"hosts is {list(profile.hosts)}, and they are to be numbered from 0 without a gap")
    if len(profile.rates) != len(hosts) or not all(rate > 0 for rate in profile.rates):
        raise _bad(path, f"rates is {list(profile.rates)}: a number above 0 for each of {len(hosts)} hosts is wanted")
    for one in profile.library:
        sizes = [size for size, _ in one.points]
        if one.op not in ALGORITHMS or not sizes or sizes != sorted(set(sizes)) or any(s <= 0 for _, s in one.points):
            raise _bad(
                path,
                f"library has {one.op} of {list(map(list, one.points))}: a collective, and rising bytes, are wanted",
            )
