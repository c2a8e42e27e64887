"""The cache against a list that does the same slowly, and what threads, callbacks and finalisers may do to it."""

import sys
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.lru_cache import LRUCache

KINDS = pytest.mark.parametrize("thread_safe", [False, True])


def filled(cache: LRUCache, text: str) -> LRUCache:
    """Each letter put with its code."""
    for letter in text:
        cache.put(letter, ord(letter))
    return cache


@KINDS
def test_the_least_recently_used_goes_first(thread_safe):
    gone = []
    cache = LRUCache[str, int](
        3, on_evict=lambda key, value: gone.append((key, value, list(cache))), thread_safe=thread_safe
    )
    filled(cache, "abc")
    assert list(cache) == ["a", "b", "c"]
    assert cache.get("a") == 97
    assert list(cache) == ["b", "c", "a"]
    cache.put("d", 100)
    assert gone == [("b", 98, ["c", "a", "d"])]  # told once the new entry is in
    cache.put("c", 0)  # overwriting is a use, and tells nobody
    assert list(cache) == ["a", "d", "c"]
    assert (len(cache), cache.weight, cache.max_weight, len(gone)) == (3, 3, 3, 1)
    assert "a" in cache
    assert "b" not in cache


@KINDS
def test_looking_on_is_not_a_use(thread_safe):
    cache = filled(LRUCache(3, thread_safe=thread_safe), "abc")
    assert cache.peek("a") == 97
    assert cache.peek("z") is None
    assert cache.peek("z", 5) == 5
    assert "a" in cache
    assert list(cache) == ["a", "b", "c"]
    assert (cache.hits, cache.misses, cache.hit_rate) == (0, 0, 0.0)


@KINDS
def test_statistics(thread_safe):
    cache = filled(LRUCache(2, thread_safe=thread_safe), "abc")
    assert [cache.get(key) for key in "abcb"] == [None, 98, 99, 98]
    assert cache.get("a", 7) == 7
    assert (cache.hits, cache.misses, cache.evictions, cache.hit_rate) == (3, 2, 1, 0.6)
    cache.pop("b")
    cache.clear()
    assert (cache.hits, cache.misses, cache.evictions, cache.hit_rate) == (3, 2, 1, 0.6)


@KINDS
@pytest.mark.parametrize("weigh", [None, lambda key, value: 1])
def test_pop_and_clear_tell_nobody(thread_safe, weigh):
    gone = []
    cache = LRUCache(3, weigh=weigh, on_evict=lambda *entry: gone.append(entry), thread_safe=thread_safe)
    filled(cache, "abc")
    assert cache.pop("b") == 98
    assert cache.pop("b", 5) == 5
    with pytest.raises(KeyError, match="b"):
        cache.pop("b")
    assert (list(cache), cache.weight) == (["a", "c"], 2)
    cache.clear()
    assert (list(cache), cache.weight, len(cache), gone) == ([], 0, 0, [])
    filled(cache, "abcd")
    assert gone == [("a", 97)]


def test_a_stored_none_is_a_hit():
    cache = LRUCache(1)
    cache.put("a", None)
    assert cache.get("a", 5) is None
    assert cache.peek("a", 5) is None
    assert cache.pop("a", 5) is None
    assert (cache.hits, cache.misses) == (1, 0)


@KINDS
def test_weight_pushes_out_as_many_as_it_must(thread_safe):
    gone = []
    weigh = lambda key, value: value  # noqa: E731
    cache = LRUCache(10, weigh=weigh, on_evict=lambda *entry: gone.append(entry), thread_safe=thread_safe)
    for key, weight in {"a": 3, "b": 4, "c": 3}.items():
        cache.put(key, weight)
    cache.put("d", 5)
    assert (gone, list(cache), cache.weight) == ([("a", 3), ("b", 4)], ["c", "d"], 8)
    cache.put("c", 6)  # grows from 3 to 6: d must go, the new c stays
    assert (gone[2:], list(cache), cache.weight, cache.evictions) == ([("d", 5)], ["c"], 6, 3)
    cache.put("nothing", 0)
    cache.put("c", 10)
    assert (list(cache), cache.weight, cache.evictions) == (["nothing", "c"], 10, 3)


@KINDS
def test_what_cannot_fit_is_refused_and_nothing_changes(thread_safe):
    cache = LRUCache[Any, Any](10, weigh=lambda key, value: value, on_evict=pytest.fail, thread_safe=thread_safe)
    cache.put("a", 4)
    cache.put("b", 6)
    for key in ("c", "a"):
        with pytest.raises(ValueError, match=f"cannot cache '{key}' of weight 11: a weight must be 0 to 10"):
            cache.put(key, 11)
    with pytest.raises(ValueError, match="of weight -1"):
        cache.put("a", -1)
    with pytest.raises(TypeError):
        cache.put("a", 1.5)
    with pytest.raises(TypeError):
        cache.put([], 1)  # cannot be a key
    assert ([(key, cache.peek(key)) for key in cache], cache.weight) == ([("a", 4), ("b", 6)], 10)


@pytest.mark.parametrize(("bound", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (None, TypeError)])
def test_bounds_that_are_none(bound, error):
    with pytest.raises(error):
        LRUCache(bound)


class Naive:
    """The same cache as a list of [key, value, weight], oldest first, and no thought for speed."""

    def __init__(self, max_weight):
        self.max_weight, self.entries, self.gone, self.hits, self.misses = max_weight, [], [], 0, 0

    def find(self, key):
        return next((entry for entry in self.entries if entry[0] == key), None)

    def get(self, key):
        found = self.find(key)
        self.hits, self.misses = self.hits + (found is not None), self.misses + (found is None)
        if found:
            self.entries = [entry for entry in self.entries if entry is not found] + [found]
        return found[1] if found else None

    def peek(self, key):
        found = self.find(key)
        return found[1] if found else None

    def put(self, key, value, weight):
        if weight > self.max_weight:
            raise ValueError
        self.entries = [entry for entry in self.entries if entry[0] != key] + [(key, value, weight)]
        while sum(entry[2] for entry in self.entries) > self.max_weight:
            self.gone.append(self.entries.pop(0)[:2])

    def pop(self, key):
        found = self.peek(key)
        self.entries = [entry for entry in self.entries if entry[0] != key]
        return found

    def clear(self):
        self.entries = []


KEYS = st.integers(0, 7)
STEPS = st.lists(
    st.tuples(st.sampled_from(["get", "peek", "pop"]), KEYS)
    | st.tuples(st.just("put"), KEYS, st.integers(0, 6))
    | st.tuples(st.just("clear")),
    max_size=40,
)


@given(STEPS, st.integers(1, 9), st.booleans(), st.booleans())
def test_it_does_what_a_naive_one_does(steps, max_weight, weighed, thread_safe):
    gone = []
    weigh = (lambda key, value: value[1]) if weighed else None
    cache = LRUCache(max_weight, weigh=weigh, on_evict=lambda *entry: gone.append(entry), thread_safe=thread_safe)
    naive = Naive(max_weight)
    for count, (what, *given_) in enumerate(steps):
        if what == "put":
            key, weight = given_
            try:
                naive.put(key, (count, weight), weight if weighed else 1)
            except ValueError:
                with pytest.raises(ValueError, match="cannot cache"):
                    cache.put(key, (count, weight))
            else:
                cache.put(key, (count, weight))
        elif what == "pop":
            assert cache.pop(*given_, None) == naive.pop(*given_)
        else:
            assert getattr(cache, what)(*given_) == getattr(naive, what)(*given_)
        assert [(key, cache.peek(key)) for key in cache] == [entry[:2] for entry in naive.entries]
        assert cache.weight == sum(entry[2] for entry in naive.entries) <= max_weight
        assert len(cache) == len(naive.entries)
    assert gone == naive.gone
    assert (cache.hits, cache.misses, cache.evictions) == (naive.hits, naive.misses, len(naive.gone))


class Key:
    """Equal to a key of the same number, and counts how often it is asked."""

    asked = 0

    def __init__(self, number):
        self.number = number

    def __hash__(self):
        Key.asked += 1
        return hash(self.number)

    def __eq__(self, other):
        Key.asked += 1
        return self.number == other.number


@pytest.mark.parametrize("weigh", [None, lambda key, value: 1])
def test_the_work_does_not_grow_with_the_cache(weigh):
    def asked(size):
        cache = LRUCache(size, weigh=weigh)
        for number in range(size):
            cache.put(Key(number), number)
        counts = []
        for call in (
            lambda: cache.get(Key(size // 2)),
            lambda: cache.get(Key(-5)),
            lambda: cache.put(Key(size), 0),
            lambda: cache.put(Key(size), 1),
            lambda: cache.pop(Key(size)),
        ):
            Key.asked = 0
            call()
            counts.append(Key.asked)
        assert (cache.hits, cache.misses, cache.evictions) == (1, 1, 1)
        return counts

    small = asked(8)
    assert small == asked(8000)
    assert max(small) <= 16


@KINDS
def test_the_callback_may_use_the_cache(thread_safe):
    second = []
    first = LRUCache(2, on_evict=lambda key, value: second.append((key, first.get("b"))), thread_safe=thread_safe)
    filled(first, "abc")
    assert second == [("a", 98)]
    assert list(first) == ["c", "b"]


@KINDS
def test_an_error_of_the_callback_leaves_the_cache_whole(thread_safe):
    def refuse(key, value):
        raise RuntimeError(key)

    cache = filled(LRUCache(2, on_evict=refuse, thread_safe=thread_safe), "ab")
    with pytest.raises(RuntimeError, match="a"):
        cache.put("c", 99)
    assert (list(cache), cache.weight, cache.evictions) == (["b", "c"], 2, 1)


@KINDS
def test_the_loop_may_use_the_cache(thread_safe):
    cache = filled(LRUCache(3, thread_safe=thread_safe), "abc")
    assert [cache.pop(key) if key == "b" else cache.get(key) for key in cache] == [97, 98, 99]


@KINDS
@pytest.mark.parametrize("act", ["clear", "overwrite"])
def test_a_value_may_use_the_cache_as_it_goes(thread_safe, act):
    class Value:
        def __del__(self):
            cache.put("last words", 3)

    cache = LRUCache(4, weigh=lambda key, value: value if isinstance(value, int) else 1, thread_safe=thread_safe)
    cache.put("a", Value())
    cache.clear() if act == "clear" else cache.put("a", 2)
    assert list(cache) == ["last words"]
    assert (cache.weight, len(cache)) == (3, 1)


def in_thread(work):
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


@KINDS
def test_the_lock_is_held_while_the_cache_changes(thread_safe):
    cache = LRUCache[Any, Any](2, thread_safe=thread_safe)
    others = []

    class Slow:
        """While the cache looks this key up, another thread tries to put one of its own."""

        def __hash__(self):
            others.append(in_thread(lambda: cache.put("other", 0)))
            others[-1].join(0.05 if thread_safe else 5)
            assert others[-1].is_alive() == thread_safe
            return 1

    cache.get(Slow())
    assert len(others) == 1
    others[0].join(5)
    assert "other" in cache


def test_the_lock_is_not_held_for_weigh_and_on_evict():
    def ask_from_another_thread(*_):
        other = in_thread(lambda: cache.get("b"))
        other.join(5)
        asked.append(not other.is_alive())
        return 1

    asked = []
    cache = LRUCache(2, weigh=ask_from_another_thread, on_evict=ask_from_another_thread, thread_safe=True)
    filled(cache, "abc")
    assert asked == [True] * 4  # three weighed, one evicted
    assert list(cache) == ["c", "b"]


def test_threads_lose_and_double_nothing():
    threads, each, size = 4, 1500, 50
    gone, popped, start = [], [], threading.Barrier(threads)
    cache = LRUCache[Any, Any](
        size, weigh=lambda key, value: 1 + value % 3, on_evict=lambda *e: gone.append(e), thread_safe=True
    )

    def use(own):
        start.wait(5)
        for count in range(each):
            cache.put((own, count), count)
            cache.get((own, count))
            cache.get((own + 1) % threads)
            if count % 7 == 0:
                value = cache.pop((own, count), -1)
                if value >= 0:
                    popped.append(((own, count), value))
            if count % 50 == 0:
                assert len(list(cache)) <= size

    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # seconds: threads take turns as often as they can
    try:
        running = [in_thread(lambda own=own: use(own)) for own in range(threads)]
        for thread in running:
            thread.join(30)
        assert not any(thread.is_alive() for thread in running)
    finally:
        sys.setswitchinterval(switch)
    weight = cache.weight
    left = [(key, cache.pop(key)) for key in cache]
    assert sorted(gone + popped + left) == [((own, n), n) for own in range(threads) for n in range(each)]
    assert cache.hits + cache.misses == 2 * threads * each
    assert cache.evictions == len(gone)
    assert weight == sum(1 + value % 3 for _, value in left) <= size
    assert cache.weight == 0
