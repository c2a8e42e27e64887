"""The chosen intervals against every subset there is."""

import math
import random
from itertools import combinations, combinations_with_replacement, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.intervals import heaviest_intervals, most_intervals

TOUCHING = pytest.mark.parametrize("touching", [True, False])
SMALL = [(start, end) for start in range(-1, 3) for end in range(start, 3)]  # 10 of them, 4 of zero length


def compatible(a, b, touching):
    """Whether one has ended by the time the other starts."""
    return a[1] <= b[0] or b[1] <= a[0] if touching else a[1] < b[0] or b[1] < a[0]


def check(intervals, weights, touching):
    """Compare with every set of pairwise compatible intervals, and the documented choice among the best ones."""
    order = sorted(range(len(intervals)), key=lambda index: (intervals[index][1], intervals[index][0], index))
    sets = [  # as places in that order
        places
        for size in range(len(order) + 1)
        for places in combinations(range(len(order)), size)
        if all(compatible(intervals[order[a]], intervals[order[b]], touching) for a, b in combinations(places, 2))
    ]

    def weight(places):
        return sum(weights[order[place]] for place in places)

    size = max(map(len, sets))
    first = min(places for places in sets if len(places) == size)
    assert most_intervals(intervals, touching=touching) == [order[place] for place in first]

    # The one that does without the last is, with a bit a place, the lower number.
    heaviest = max(map(weight, sets))
    lowest = min((places for places in sets if weight(places) == heaviest), key=lambda p: sum(2**place for place in p))
    assert heaviest_intervals(intervals, weights, touching=touching) == [order[place] for place in lowest]


@TOUCHING
def test_all_small_inputs(touching):
    draw = random.Random(0)
    for size in range(5):
        for intervals in combinations_with_replacement(SMALL, size):
            shuffled = draw.sample(intervals, size)
            check(shuffled, draw.choices(range(-1, 5), k=size), touching)


@TOUCHING
def test_all_orders_and_weights_of_two(touching):
    for intervals in product(SMALL, repeat=2):
        for weights in product((-1, 0, 1, 2), repeat=2):
            check(intervals, weights, touching)


TIMES = st.integers(-6, 6) | st.sampled_from([-0.5, 0.1, 0.1 + 0.2, 0.3, -0.0, math.inf, -math.inf, 1e300])
INTERVALS = st.tuples(TIMES, TIMES).map(lambda ends: (min(ends), max(ends)))


@given(st.data(), st.booleans())
def test_it_agrees_with_trying_everything(data, touching):
    intervals = data.draw(st.lists(INTERVALS, max_size=8))
    eighths = st.integers(-8, 40).map(lambda n: n / 8)  # sums of these are exact
    check(intervals, [data.draw(eighths) for _ in intervals], touching)


def test_an_evening_of_television():
    evening = [(20, 22), (18, 19), (19, 20.5), (18.5, 19.5), (20.5, 21), (21, 23), (18, 23)]
    assert most_intervals(evening) == [1, 2, 4, 5]
    assert most_intervals(evening, touching=False) == [1, 4]
    assert heaviest_intervals(evening, [4, 1, 1, 3, 1, 1, 6]) == [3, 0]
    assert heaviest_intervals(evening, [4, 1, 1, 3, 1, 1, 8]) == [6]
    assert heaviest_intervals(evening, [4, 1, 1, 3, 1, 1, 8], touching=False) == [6]


def test_instants():
    instants = [(3, 3), (1, 3), (3, 3), (3, 5)]
    assert most_intervals(instants) == [1, 0, 2, 3]
    assert heaviest_intervals(instants, [1, 1, 1, 1]) == [1, 0, 2, 3]
    assert most_intervals(instants, touching=False) == [1]
    assert heaviest_intervals(instants, [2, 1, 3, 1], touching=False) == [2]
    assert most_intervals([(1, 5), (3, 3)]) == [1]  # strictly inside: not both
    assert heaviest_intervals([(1, 5), (3, 3)], [2, 1]) == [0]


def test_of_equals_the_earlier_index():
    assert most_intervals([(0, 2), (0, 2), (1, 2)]) == [0]
    assert heaviest_intervals([(0, 2), (0, 2), (1, 2)], [5, 5, 5]) == [0]


def test_nothing_to_choose():
    assert most_intervals([]) == []
    assert heaviest_intervals([], []) == []
    assert heaviest_intervals([(0, 1), (1, 2)], [0, -1]) == []


@pytest.mark.parametrize("bad", [(2, 1), (math.nan, 1), (1, math.nan), (math.nan, math.nan)])
def test_what_is_no_interval_is_named(bad):
    told = f"interval 1 must end no earlier than it starts: start {bad[0]}, end {bad[1]}"
    with pytest.raises(ValueError, match=told):
        most_intervals([(0, 1), bad])
    with pytest.raises(ValueError, match=told):
        heaviest_intervals([(0, 1), bad], [1, 1])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_weight_is_named(bad):
    with pytest.raises(ValueError, match=f"weight 1 must be finite, not {bad}"):
        heaviest_intervals([(0, 1), (1, 2)], [1, bad])


@pytest.mark.parametrize("weights", [[], [1], [1, 2, 3]])
def test_a_weight_for_each(weights):
    with pytest.raises(ValueError, match=f"2 intervals need as many weights, not {len(weights)}"):
        heaviest_intervals([(0, 1), (1, 2)], weights)


class Time:
    """A point in time that counts how often it is compared."""

    compared = 0

    def __init__(self, at):
        self.at = at

    def __lt__(self, other):
        Time.compared += 1
        return self.at < getattr(other, "at", other)

    def __le__(self, other):
        return not other < self

    def __gt__(self, other):
        return getattr(other, "at", other) < self.at

    def __eq__(self, other):
        return self.at == getattr(other, "at", other)

    __hash__ = None


@pytest.mark.parametrize(
    "choose", [most_intervals, lambda intervals: heaviest_intervals(intervals, [1] * len(intervals))]
)
def test_comparisons_grow_as_n_log_n(choose):
    count = 2000
    starts = [random.Random(0).randrange(10**6) for _ in range(count)]
    Time.compared = 0
    choose([(Time(start), Time(start + 500)) for start in starts])
    assert Time.compared < 4 * count * math.log2(count)
