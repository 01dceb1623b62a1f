"""How long ranks wait, compared from time to time: whether the links have changed."""

import math
import time
from collections.abc import Sequence
from statistics import fmean, median
from typing import final

SHARE = 0.02  # of the time of a run that comparisons take at most
CHANGED = 0.5  # of a step, by which the wait has changed then

Said = tuple[float, float, float]  # seconds of waiting, of computing, and of the last comparison


@final
class Waits:
    """Compares the waits of the ranks every few steps; all decide alike, by what all say."""

    def __init__(self) -> None:
        self._steps: list[tuple[float, float]] = []  # since the last comparison
        self._interval = self.due = math.inf  # steps between two, and the step of the next
        self._before: float | None = None  # the wait then
        self._began = self._cost = 0.0  # when the last one began, and how long it took

    def begin(self, step: int, interval: int | None) -> None:
        """Compare again every ``interval`` steps from ``step`` on, or no more."""
        self._steps, self._before, self._interval = [], None, interval or math.inf
        self.due = step + self._interval

    def add(self, waited: float, computed: float) -> None:
        """Note how long this rank has waited and computed in a step."""
        self._steps.append((waited, computed))

    def said(self) -> Said:
        """Return what this rank says of the steps since the last comparison."""
        waited, computed = zip(*self._steps, strict=True)
        self._steps, self._began = [], time.perf_counter()
        return fmean(waited), median(computed), self._cost

    def have_changed(self, said: Sequence[Said], step: int) -> bool:
        """Return whether the ranks wait for longer or shorter than before, by what all have said.

        The next comparison follows later if this one took long: its messages pass behind those of
        an exchange.
        """
        (now, computed, cost), before = map(median, zip(*said, strict=True)), self._before
        rounds = math.ceil(cost / SHARE / max(now + computed, 1e-9) / self._interval)
        self._before, self.due = now, step + max(1, rounds) * self._interval
        self._cost = time.perf_counter() - self._began
        return before is not None and abs(now - before) > CHANGED * (computed + before)
