"""Things that go wrong in a lab while it runs, each in a thread of its own."""

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from offbeat.lab.cluster import Cluster


@dataclass(frozen=True)
class Reach:
    """What faults can do to a running lab."""

    set_link: Callable[[int, bool], None]  # node, up
    signal_node: Callable[[int, int], None]  # node, signal number
    kill: Callable[[int], None]  # rank
    tell: Callable[[str], None]


class Fault(ABC):
    """One thing that goes wrong; times are seconds since all ranks have started."""

    @abstractmethod
    def check(self, world: Cluster) -> None:
        """Raise ValueError if it names a node or rank that ``world`` has not."""

    @abstractmethod
    def play(self, reach: Reach, stop: threading.Event) -> None:
        """Make it happen, in a thread of its own, until ``stop`` is set."""


@contextlib.contextmanager
def scheduled(faults: Sequence[Fault], reach: Reach) -> Iterator[None]:
    """Let ``faults`` happen while the context lasts; time starts at its entry."""
    stop = threading.Event()
    threads = [
        threading.Thread(target=fault.play, args=(reach, stop), name=f"offbeat-lab-{fault}")
        for fault in faults
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
