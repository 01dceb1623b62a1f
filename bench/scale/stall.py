"""How long the step of an admission takes on the ranks that let a newcomer in."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from statistics import median

import offbeat

AROUND = 5  # steps before and after an admission that count as its own


class Watch:
    """The seconds of all calls of ``step()`` of one rank, but of those that noticed a loss.

    Such a call has waited for the lost rank until its silence was long enough.
    """

    def __init__(self, replica: offbeat.Replica) -> None:
        self._replica, self._seconds = replica, dict[int, float]()
        self._lost_in = set[int]()

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Time the call inside the block."""
        step, lost, begin = self._replica.steps, len(self._replica.lost), time.perf_counter()
        yield
        self._seconds[step] = time.perf_counter() - begin
        if len(self._replica.lost) > lost:
            self._lost_in.add(step)

    @property
    def median(self) -> float:
        """The median of all calls."""
        return median(self._seconds.values())

    def stalls(self, steps: Iterable[int]) -> dict[int, float]:
        """Return the longest call around each of ``steps``, those of the admissions.

        Without admissions before this rank came, and those around which a rank was lost.
        """
        found = {}
        for step in steps:
            around = range(step - AROUND, step + AROUND + 1)
            calls = [self._seconds[each] for each in around if each in self._seconds]
            if step in self._seconds and not self._lost_in.intersection(around):
                found[step] = max(calls)
        return found
