"""outlast.lru_cache against cachetools.LRUCache, on one thread, interleaved in one run.

Goals: on every row ours takes no longer than cachetools, as the median ratio of their times, or the difference lies
within the spread between two runs of the same thing. Ours counts hits and misses meanwhile; cachetools does not.

    python -m benchmarks.lru_cache            measure, print the table, write benchmarks/results/lru_cache.json
    python -m benchmarks.lru_cache --check    the same, and exit 1 where a goal is missed
"""

import argparse
import random
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Final

import cachetools

from benchmarks import measure
from outlast.lru_cache import LRUCache

GOALS: Final = ("ratio of ours to cachetools at most 1.0, or within the spread between two runs of ours",)
ENTRIES: Final = 1000
"""Bound of every cache here; in the weighted rows an entry weighs 1 too, so that the bound means the same."""
CALLS: Final = 20_000
"""Calls in one run."""

Ours = LRUCache[int, int]
Theirs = cachetools.LRUCache[int, int]
Work = Callable[[], None]


def filled(*, thread_safe: bool = False) -> tuple[Ours, Theirs]:
    """A full cache of each kind, with the keys 0 to ENTRIES - 1."""
    ours, theirs = Ours(ENTRIES, thread_safe=thread_safe), Theirs(ENTRIES)
    for key in range(ENTRIES):
        ours.put(key, key)
        theirs[key] = key
    return ours, theirs


def each(call: Callable[[int], object], keys: Iterable[int]) -> Work:
    """The work of calling with every key in turn."""

    def work() -> None:
        for key in keys:
            call(key)

    return work


def hits() -> tuple[Work, Work]:
    """`get` of keys that are there."""
    ours, theirs = filled()
    keys = random.Random(1).choices(range(ENTRIES), k=CALLS)
    return each(ours.get, keys), each(theirs.get, keys)


def hits_by_subscript() -> tuple[Work, Work]:
    """`get` of keys that are there, against `cache[key]`, which is cachetools' fastest way to a hit."""
    ours, theirs = filled()
    keys = random.Random(1).choices(range(ENTRIES), k=CALLS)

    def subscript() -> None:
        for key in keys:
            theirs[key]

    return each(ours.get, keys), subscript


def hits_under_lock() -> tuple[Work, Work]:
    """`get` of keys that are there, with `thread_safe=True` against a lock around cachetools."""
    ours, theirs = filled(thread_safe=True)
    lock = threading.RLock()
    keys = random.Random(1).choices(range(ENTRIES), k=CALLS)

    def locked() -> None:
        for key in keys:
            with lock:
                theirs.get(key)

    return each(ours.get, keys), locked


def misses() -> tuple[Work, Work]:
    """`get` of keys that are not there."""
    ours, theirs = filled()
    keys = random.Random(1).choices(range(ENTRIES, 2 * ENTRIES), k=CALLS)
    return each(ours.get, keys), each(theirs.get, keys)


def puts(ours: Ours, theirs: Theirs) -> tuple[Work, Work]:
    """Put keys in a cycle twice as long as the bound, so that each, once the cache is full, evicts another."""
    keys = [call % (2 * ENTRIES) for call in range(CALLS)]

    def put_ours() -> None:
        for key in keys:
            ours.put(key, key)

    def put_theirs() -> None:
        for key in keys:
            theirs[key] = key

    return put_ours, put_theirs


def puts_by_number() -> tuple[Work, Work]:
    """Puts that evict, bounded by the number of entries."""
    return puts(Ours(ENTRIES), Theirs(ENTRIES))


def puts_by_weight() -> tuple[Work, Work]:
    """Puts that evict, bounded by weight."""
    return puts(Ours(ENTRIES, weigh=lambda key, value: 1), Theirs(ENTRIES, getsizeof=lambda value: 1))


def zipf() -> tuple[Work, Work]:
    """`get`, and `put` after a miss, of keys of which the n-th most common comes with frequency 1/n."""
    ours, theirs = filled()
    kinds = 10 * ENTRIES
    keys = random.Random(1).choices(range(kinds), weights=[1 / (n + 1) for n in range(kinds)], k=CALLS)

    def use_ours() -> None:
        for key in keys:
            if ours.get(key) is None:
                ours.put(key, key)

    def use_theirs() -> None:
        for key in keys:
            if theirs.get(key) is None:
                theirs[key] = key

    return use_ours, use_theirs


def main() -> None:
    """Measure, print and write; with --check exit 1 where a goal is missed, the figures on the last line."""
    parser = argparse.ArgumentParser(description="outlast.lru_cache against cachetools.LRUCache")
    parser.add_argument("--check", action="store_true", help="exit 1 where a goal is missed")
    parser.add_argument("--rounds", type=int, default=51, help="rounds of ours, cachetools, ours (default: 51)")
    options = parser.parse_args()
    rows = []
    for name, make in (
        ("hit", hits),
        ("hit, against cache[key]", hits_by_subscript),
        ("hit, both locked", hits_under_lock),
        ("miss", misses),
        ("put", puts_by_number),
        ("put, weighed", puts_by_weight),
        ("Zipf mix", zipf),
    ):
        pair = measure.paired(*make(), options.rounds)
        rows.append(
            {
                "what": name,
                "ours ns": round(pair.a_seconds / CALLS * 1e9, 1),
                "theirs ns": round(pair.b_seconds / CALLS * 1e9, 1),
                "ratio": round(pair.ratio, 3),
                "A/A spread": "{:.3f}-{:.3f}".format(*pair.spread),
                "met": pair.meets(1.0),
            }
        )
    measure.show("outlast and cachetools, ns a call; A/A: ours over ours", rows)
    measure.save("lru_cache", GOALS, rows)
    missed = [row for row in rows if not row["met"]]
    worst = max(missed or rows, key=lambda row: row["ratio"])
    verdict = f"{len(missed)} of {len(rows)} goals missed" if missed else f"all {len(rows)} goals met"
    print(f"{verdict}; worst ratio {worst['ratio']} ({worst['what']})")
    sys.exit(1 if options.check and missed else 0)


if __name__ == "__main__":
    main()
