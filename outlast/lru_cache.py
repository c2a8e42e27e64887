"""A cache that forgets what was used least recently, bounded by the number of entries or by their weight. No torch.

An OrderedDict holds the entries from oldest to newest: a use moves an entry to the end, eviction takes from the front.
A plain dict could keep the same order, but finding its front walks over every entry deleted there before, so that an
eviction would take longer the larger the cache.
"""

import operator
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, Generic, Self, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class LRUCache(Generic[K, V]):
    """Keep the entries used last, within a bound on their weight; `get` and `put` take constant time.

    Iteration goes over the keys as they stood when it began, from oldest to newest, so the loop may use the cache.
    `in`, `len`, `peek` and iteration are not uses: they change neither the order nor the statistics.

    Args:
        max_weight: most that the entries may weigh together, a whole number, at least 1; in the unit of `weigh`.
        weigh: weight of an entry from its key and value, a whole number, at least 0, asked once by each `put`.
            Without it every entry weighs 1, so that `max_weight` is the number of entries.
        on_evict: called with the key and value of each entry the bound pushes out, oldest first, once the new entry
            is in; not for what `pop`, `clear` or a new value for the same key removes. It may use the cache. An error
            it raises leaves through `put`: the new entry stays, and the rest of those pushed out go unannounced.
        thread_safe: whether threads may share the cache; a lock then makes each method one step. `weigh` and
            `on_evict` are called outside the lock, by the thread that called `put`.

    Attributes:
        hits, misses: how often `get` found its key, and how often it did not.
        evictions: how many entries the bound pushed out.

    Raises:
        TypeError: `max_weight`, or a weight met later, is not a whole number.
        ValueError: `max_weight` is below 1.

    Source: benchmarks/lru_cache.py measures it against cachetools.LRUCache.

    Not covered: entries that expire or are pinned, a bound that changes, pickling, subclasses with `thread_safe=True`.
    """

    __slots__ = ("_entries", "_on_evict", "_weigh", "_weight", "_weights", "evictions", "hits", "max_weight", "misses")

    def __new__(cls, *_: Any, thread_safe: bool = False, **__: Any) -> Self:
        """Choose the class that takes a lock, or the one that does not even ask whether it should."""
        kind: Any = _LockedLRUCache if thread_safe else cls
        return super().__new__(kind)

    def __init__(
        self,
        max_weight: int,
        *,
        weigh: Callable[[K, V], int] | None = None,
        on_evict: Callable[[K, V], object] | None = None,
        thread_safe: bool = False,  # read by __new__
    ) -> None:
        self.max_weight = operator.index(max_weight)
        if self.max_weight < 1:
            raise ValueError(f"max_weight must be at least 1, not {max_weight}")
        self._weigh, self._on_evict = weigh, on_evict
        self.hits = self.misses = self.evictions = 0
        self.clear()

    def get(self, key: K, default: V | None = None) -> V | None:
        """Value of the key, which becomes the newest and counts as a hit, or the default, which counts as a miss."""
        entries = self._entries
        if key in entries:  # looking twice on a hit costs less than an exception or a sentinel on a miss
            entries.move_to_end(key)
            self.hits += 1
            return entries[key]
        self.misses += 1
        return default

    def peek(self, key: K, default: V | None = None) -> V | None:
        """Value of the key, or the default, without this counting as a use."""
        return self._entries.get(key, default)

    def put(self, key: K, value: V) -> None:
        """Make this the newest entry, in place of any under the same key, and push out the oldest past the bound.

        Raises:
            TypeError: the entry's weight is not a whole number; the cache is as it was.
            ValueError: the entry alone is heavier than the bound, or its weight negative; the cache is as it was.
        """
        weight = 1 if self._weigh is None else operator.index(self._weigh(key, value))
        if not 0 <= weight <= self.max_weight:
            raise ValueError(f"cannot cache {key!r} of weight {weight}: a weight must be 0 to {self.max_weight}")
        evicted = self._store(key, value, weight)
        if self._on_evict is not None:
            for entry in evicted:
                self._on_evict(*entry)

    def _store(self, key: K, value: V, weight: int) -> list[tuple[K, V]]:
        """The part of `put` that must not be interrupted; returns the entries pushed out, oldest first."""
        entries, weights = self._entries, self._weights
        if key in entries:
            _held = entries[key]  # until the change is complete, as its finaliser may use the cache
            entries.move_to_end(key)
            self._weight -= 1 if weights is None else weights[key]
        self._weight += weight
        if weights is not None:
            weights[key] = weight
        entries[key] = value
        evicted = []
        while self._weight > self.max_weight:  # stops before the new entry, which fits alone
            entry = entries.popitem(last=False)
            self._weight -= 1 if weights is None else weights.pop(entry[0])
            evicted.append(entry)
        self.evictions += len(evicted)
        return evicted

    def pop(self, key: K, *default: V) -> V:
        """Remove the key and return its value, or the default; no callback, and not a hit, miss or eviction.

        Raises:
            KeyError: the key is not there and no default was given.
        """
        found = key in self._entries
        value = self._entries.pop(key, *default)
        if found:
            self._weight -= 1 if self._weights is None else self._weights.pop(key)
        return value

    def clear(self) -> None:
        """Remove every entry, without callbacks; the statistics stay."""
        # New containers, as finalisers of the values that go with the old ones may use the cache.
        self._weight = 0
        self._weights: dict[K, int] | None = None if self._weigh is None else {}
        self._entries: OrderedDict[K, V] = OrderedDict()

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[K]:
        return iter(list(self._entries))

    @property
    def weight(self) -> int:
        """What the entries weigh together, in the unit of `weigh`; at most `max_weight`."""
        return self._weight

    @property
    def hit_rate(self) -> float:
        """Share of the calls of `get` that found their key, 0 to 1; 0 before the first call."""
        hits = self.hits  # read once, as another thread may be counting
        return hits / (hits + self.misses or 1)


class _LockedLRUCache(LRUCache[K, V]):
    """The cache for threads; what it does not override reads one thing in one step and needs no lock."""

    __slots__ = ("_lock",)

    def __init__(self, max_weight: int, **options: Any) -> None:
        # Reentrant, since a finaliser that runs under the lock may use the cache.
        self._lock = threading.RLock()
        super().__init__(max_weight, **options)

    def get(self, key: K, default: V | None = None) -> V | None:
        with self._lock:
            return LRUCache.get(self, key, default)  # super() would cost as much again as the lock

    def _store(self, key: K, value: V, weight: int) -> list[tuple[K, V]]:
        with self._lock:
            return super()._store(key, value, weight)

    def pop(self, key: K, *default: V) -> V:
        with self._lock:
            return super().pop(key, *default)

    def clear(self) -> None:
        with self._lock:
            super().clear()

    def __iter__(self) -> Iterator[K]:
        with self._lock:
            return super().__iter__()
