"""Which of the things that want the same time can all have it: the television programmes problem. No torch.

The use here is choosing among transfers that compete for one link. Two intervals are compatible when one has ended by
the time the other starts. One of zero length is an instant: it stands against every interval it lies strictly inside,
and `touching` decides whether it may lie at another's start or end, or at the same instant as another.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence


def most_intervals(intervals: Sequence[tuple[float, float]], *, touching: bool = True) -> list[int]:
    """Choose as many pairwise compatible intervals as there can be, in O(n log n).

    Of those that can still be had it always takes the one that ends first, as no other leaves more room.

    Args:
        intervals: start and end of each, in any one unit; an end may equal its start.
        touching: whether an interval may start at the moment another ends.

    Returns:
        Indices into `intervals`, in order of time. Of several largest sets, the one whose first interval ends first;
        then that whose first starts first, then that with the lower index; then the same for its second, and so on.

    Raises:
        ValueError: an interval ends before it starts, or has NaN for a start or an end.

    Source: Kleinberg and Tardos, Algorithm Design (2005), section 4.1.

    Not covered: several links at once, and intervals that may be moved.
    """
    chosen: list[int] = []
    free = -math.inf  # end of the last one chosen
    for index in _by_end(intervals):
        start, end = intervals[index]
        # The first needs no comparison: one that starts at minus infinity would fail it without touching.
        if not chosen or start > free or (touching and start == free):
            chosen.append(index)
            free = end
    return chosen


def heaviest_intervals(
    intervals: Sequence[tuple[float, float]], weights: Sequence[float], *, touching: bool = True
) -> list[int]:
    """Choose the pairwise compatible intervals that weigh most together, in O(n log n).

    Args:
        intervals: start and end of each, in any one unit; an end may equal its start.
        weights: what each is worth, in any one unit, finite; one worth nothing or less is never chosen.
        touching: whether an interval may start at the moment another ends.

    Returns:
        Indices into `intervals`, in order of time. Of several heaviest sets, the one that does without the interval
        last in order of end, then start, then index; if all or none need that one, without the last but one; and so on.

    Raises:
        ValueError: an interval ends before it starts or has NaN for a start or an end, a weight is not finite, or there
            are more or fewer weights than intervals.

    Source: Kleinberg and Tardos, Algorithm Design (2005), section 6.1.

    Not covered: exact sums of floats; sets whose weights differ by less than rounding count as either.
    """
    if len(weights) != len(intervals):
        raise ValueError(f"{len(intervals)} intervals need as many weights, not {len(weights)}")
    for index, weight in enumerate(weights):
        if not math.isfinite(weight):
            raise ValueError(f"weight {index} must be finite, not {weight}")
    order = _by_end(intervals)
    ends = [intervals[index][1] for index in order]
    bisect = bisect_right if touching else bisect_left
    # Of the first n in order: before[n - 1] is how many of them end in time for the last one, best[n] the most they can
    # weigh together. The bound n - 1 keeps an instant, which ends in time for itself, from being counted twice.
    before = [bisect(ends, intervals[index][0], hi=place) for place, index in enumerate(order)]
    best: list[float] = [0]
    for place, index in enumerate(order):
        best.append(max(best[place], weights[index] + best[before[place]]))
    chosen: list[int] = []
    place = len(order)
    while place > 0:
        if best[place] > best[place - 1]:  # the last of these is needed
            chosen.append(order[place - 1])
            place = before[place - 1]
        else:
            place -= 1
    return chosen[::-1]


def _by_end(intervals: Sequence[tuple[float, float]]) -> list[int]:
    """Indices in order of end, then start, then index, once every interval is found to be one.

    The start matters where ends are equal: an instant at the end of an interval must come after it, not before.

    Raises:
        ValueError: naming the first interval that ends before it starts, or has NaN for a start or an end.
    """
    for index, (start, end) in enumerate(intervals):
        if not start <= end:  # neither less nor equal: inverted, or NaN
            raise ValueError(f"interval {index} must end no earlier than it starts: start {start}, end {end}")
    return sorted(range(len(intervals)), key=lambda index: (intervals[index][1], intervals[index][0]))
