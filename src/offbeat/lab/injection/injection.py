"""The interface of faults, and their injection into a run."""

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from offbeat.lab.cluster import Cluster


@dataclass(frozen=True)
class RunControl:
    """The operations on a run in progress that are available to faults."""

    set_link: Callable[[int, bool], None]  # node, up
    signal_node: Callable[[int, int], None]  # node, signal number
    kill: Callable[[int], None]  # rank
    log: Callable[[str], None]


class Fault(ABC):
    """Defines a fault to inject into a run. Times are in seconds since the start of all ranks."""

    @abstractmethod
    def validate(self, cluster: Cluster) -> None:
        """Raise ValueError if the fault names a node or rank that ``cluster`` does not have."""

    @abstractmethod
    def inject(self, control: RunControl, stop: threading.Event) -> None:
        """Cause the fault, and return when it is over or ``stop`` is set; runs in a thread."""


@contextlib.contextmanager
def injected(faults: Sequence[Fault], control: RunControl) -> Iterator[None]:
    """Inject ``faults`` while the context lasts, each from a thread; time starts at entry."""
    stop = threading.Event()
    threads = [
        threading.Thread(target=fault.inject, args=(control, stop), name=f"offbeat-lab-{fault}")
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
