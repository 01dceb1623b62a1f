"""Ordered positions as half-open intervals: a million of them in a row are one pair."""

from collections.abc import Iterable

Intervals = tuple[tuple[int, int], ...]


def count(intervals: Iterable[tuple[int, int]]) -> int:
    """Return the number of positions.

    >>> count([(5, 8), (0, 1)])
    4
    """
    return sum(high - low for low, high in intervals)


def cut(intervals: Iterable[tuple[int, int]], start: int, stop: int) -> Intervals:
    """Return the positions from the ``start``-th up to the ``stop``-th, in their order.

    >>> cut([(5, 8), (0, 3)], 2, 5)
    ((7, 8), (0, 2))
    """
    found = []
    for low, high in intervals:
        first, last = max(low, low + start), min(high, low + stop)
        if first < last:
            found.append((first, last))
        start, stop = start - (high - low), stop - (high - low)
        if stop <= 0:
            break
    return tuple(found)


def without(intervals: Iterable[tuple[int, int]], taken: Iterable[tuple[int, int]]) -> Intervals:
    """Return the positions that are not in ``taken``, in their order.

    >>> without([(5, 8), (0, 3)], [(6, 7), (0, 1)])
    ((5, 6), (7, 8), (1, 3))
    """
    left = tuple(intervals)
    for start, stop in taken:
        parts = [((low, min(high, start)), (max(low, stop), high)) for low, high in left]
        left = tuple((low, high) for pair in parts for low, high in pair if low < high)
    return left
