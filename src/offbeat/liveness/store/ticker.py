"""A thread that calls functions again and again, less often where it cannot keep up."""

import threading
import time
from collections.abc import Callable

SLOW = 0.5  # seconds that a call may take without consequences


class Ticker:
    """Calls functions every ``seconds`` on one daemon thread, at first after that time.

    Attributes:
        stretch: the factor by which the time between two rounds is longer at present.
    """

    def __init__(self, seconds: float, name: str) -> None:
        self.stretch = 1.0
        self._seconds, self._name = seconds, name
        self._ticks: list[Callable[[], None]] = []
        self._changing, self._in_round = threading.Lock(), threading.Lock()
        self._waking = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, tick: Callable[[], None]) -> None:
        """Call ``tick`` too; the first starts the thread."""
        with self._changing:
            self._ticks.append(tick)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def wake(self) -> None:
        """Make the next round now."""
        self._waking.set()

    def remove(self, tick: Callable[[], None], timeout: float) -> bool:
        """Call ``tick`` no more, the last ends the thread; whether it is certain not to run."""
        until = time.monotonic() + timeout
        with self._changing:
            self._ticks = [other for other in self._ticks if other != tick]
            if not self._ticks:
                self._waking.set()
        if not self._in_round.acquire(timeout=timeout):
            return False
        self._in_round.release()
        thread = self._thread
        while thread is not None and not self._ticks and time.monotonic() < until:
            thread.join(0.01)
            thread = self._thread
        return True

    def _run(self) -> None:
        due = time.monotonic() + self._seconds
        while True:
            self._waking.wait(max(0.0, due - time.monotonic()))
            self._waking.clear()
            with self._changing:
                if not self._ticks:
                    self._thread = None
                    return
            # A thread that is woken late is a sign, too, of a process that cannot keep up.
            started = min(due, time.monotonic())
            with self._in_round:
                for tick in self._ticks:
                    if tick in self._ticks:  # not removed meanwhile
                        tick()
            now = time.monotonic()
            self.stretch = stretched(self.stretch, now - started)
            due = now + self._seconds * self.stretch


def stretched(stretch: float, seconds: float) -> float:
    """Return the next factor, at least 1, by which the time between two calls is longer.

    It grows in proportion to what a call takes, but at most twofold, so that a single pause is
    soon forgotten; and it shrinks by a twentieth per call.

    Args:
        stretch: the present factor.
        seconds: how long the last call has taken, counted from when it was due.

    >>> stretched(1.0, 0.1), stretched(1.0, 0.75), stretched(1.0, 14.0), stretched(10.0, 0.1)
    (1.0, 1.5, 2.0, 9.5)
    """
    return min(2 * stretch, max(1.0, seconds / SLOW, 0.95 * stretch))
