r"""Recursive halving between any number of ranks: who holds what, and sends what to whom.

The tree is that of :func:`offbeat.functional.tree`: adjacent blocks of ranks merge, the left one of
a power of two, the right one of at most as many. The ranks of a block hold a vector between them.
When two blocks merge, each rank keeps a part of what it holds, in proportion to the number of ranks
of its block, and sends the rest to those ranks of the other block that keep it. With powers of two
these are halves, of one partner.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple


class Cell(NamedTuple):
    """Elements [start, stop) that rank ``left`` holds of one vector and ``right`` of the other.

    After the merge ``left`` holds [start, middle) of the combination and ``right`` [middle, stop).
    """

    start: int
    middle: int
    stop: int
    left: int
    right: int


class Merge(NamedTuple):
    """The merge of the blocks of ranks [first, middle) and [middle, stop)."""

    first: int
    middle: int
    stop: int

    @property
    def share(self) -> float:
        """The share of the left block in the number of ranks."""
        return (self.middle - self.first) / (self.stop - self.first)


def merges(rank: int, size: int) -> Iterator[Merge]:
    """Yield the merges of ``rank`` on the way to the root, of a tree of ``size`` ranks.

    >>> [tuple(merge) for merge in merges(2, size=5)], [tuple(merge) for merge in merges(4, size=5)]
    ([(2, 3, 4), (0, 2, 4), (0, 4, 5)], [(0, 4, 5)])
    """
    distance = 1
    while distance < size:
        first = rank // (2 * distance) * (2 * distance)
        if first + distance < size:
            yield Merge(first, first + distance, min(first + 2 * distance, size))
        distance *= 2


def cells_of(merge: Merge, length: int) -> list[Cell]:
    """Return the cells of a merge of two vectors (length,), in order.

    >>> cells_of(Merge(4, 6, 7), length=6)
    [Cell(start=0, middle=2, stop=3, left=4, right=6),
     Cell(start=3, middle=5, stop=6, left=5, right=6)]
    """
    left, right = merge.middle - merge.first, merge.stop - merge.middle
    return [
        cell._replace(left=merge.first + cell.left, right=merge.middle + cell.right)
        for cell in _cells(left, right, length)
    ]


@lru_cache(maxsize=1024)
def _cells(left: int, right: int, length: int) -> tuple[Cell, ...]:
    """Return the cells of a merge of ``left`` and ``right`` ranks, each counted from 0."""
    found, i, j, start = [], 0, 0, 0
    ours, theirs = _holdings(left, length), _holdings(right, length)
    while start < length:
        stop = min(ours[i][0], theirs[j][0])
        if start < stop:
            middle = start + (stop - start) * left // (left + right)
            found.append(Cell(start, middle, stop, ours[i][1], theirs[j][1]))
        i, j, start = i + (ours[i][0] == stop), j + (theirs[j][0] == stop), stop
    return tuple(found)


@lru_cache(maxsize=1024)
def _holdings(size: int, length: int) -> tuple[tuple[int, int], ...]:
    """Return (stop, rank) of the runs that a block of ``size`` ranks holds, in order."""
    if size == 1:
        return ((length, 0),)
    left = 1 << (size - 1).bit_length() - 1
    found = []
    for cell in _cells(left, size - left, length):
        found += [(cell.middle, cell.left), (cell.stop, left + cell.right)]
    return tuple(found)
