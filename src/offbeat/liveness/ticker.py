"""A thread that calls a function again and again, less often where it cannot keep up."""

import threading
import time
from collections.abc import Callable

SLOW = 0.5  # seconds that a call may take without consequences


class Ticker:
    """Calls ``tick`` every ``seconds`` on a daemon thread, at first after that time.

    Attributes:
        stretch: the factor by which the time between two calls is longer at present.
        stopping: set when the thread is to end; it is after the present call.
    """

    def __init__(self, tick: Callable[[], None], seconds: float, name: str) -> None:
        self.stretch = 1.0
        self.stopping = threading.Event()
        self._tick, self._seconds = tick, seconds
        self._waking = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Make the next call now."""
        self._waking.set()

    def stop(self) -> None:
        """Make no further call."""
        self.stopping.set()
        self._waking.set()

    def join(self, timeout: float) -> bool:
        """Wait for the end of the thread; return whether it has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        due = time.monotonic() + self._seconds
        while True:
            self._waking.wait(max(0.0, due - time.monotonic()))
            self._waking.clear()
            if self.stopping.is_set():
                return
            # A thread that is woken late is a sign, too, of a process that cannot keep up.
            started = min(due, time.monotonic())
            self._tick()
            now = time.monotonic()
            self.stretch = stretched(self.stretch, now - started)
            due = now + self._seconds * self.stretch


def stretched(stretch: float, seconds: float) -> float:
    """Return the next factor, at least 1, by which the time between two calls is longer.

    It grows in proportion to what a call takes, but at most twofold, so that a single pause is
    soon forgotten; and it shrinks by a fifth per call.

    Args:
        stretch: the present factor.
        seconds: how long the last call has taken, counted from when it was due.

    >>> stretched(1.0, 0.1), stretched(1.0, 0.75), stretched(1.0, 14.0), stretched(10.0, 0.1)
    (1.0, 1.5, 2.0, 8.0)
    """
    return min(2 * stretch, max(1.0, seconds / SLOW, 0.8 * stretch))
