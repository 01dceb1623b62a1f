"""A world of threads to which others come."""

import threading
import time
from collections.abc import Callable
from typing import Any

from offbeat.testing import ThreadWorld
from offbeat.transport.world import World


class Crowd:
    """A world of threads, to which others come: one function for all, called with a layout."""

    def __init__(self, size: int, work: Callable[[World], Any]) -> None:
        self.world, self._work = ThreadWorld(size), work
        self._results: dict[int, Any] = {}
        self._threads: list[threading.Thread] = []

    def come(self, *places: World, after: float = 0.0) -> None:
        """Start a thread for each of ``places``, some time after the others."""
        for place in places:
            number = len(self._threads)
            thread = threading.Thread(target=self._enter, args=(number, place, after), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _enter(self, number: int, place: World, after: float) -> None:
        time.sleep(after)
        try:
            self._results[number] = self._work(place)
        except Exception as error:
            self._results[number] = error

    def all(self, timeout: float = 60.0) -> list[Any]:
        """Return what all return or raise: first the ranks of the start, then those who came."""
        results: list[Any] = self.world.run(self._work, timeout)
        for thread in self._threads:
            thread.join(timeout)
        return [*results, *(self._results[number] for number in range(len(self._threads)))]
