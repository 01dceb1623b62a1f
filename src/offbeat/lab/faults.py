"""Faults of a run: stragglers, links that are down and killed ranks, and their injection."""

import contextlib
import re
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import final

from offbeat.lab.cluster import Cluster

PERIOD = 0.02  # seconds; a straggler is stopped once per period
_DECIMAL = r"\d+\.?\d*|\.\d+"


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


@final
@dataclass(frozen=True)
class Straggler(Fault):
    """Slows a node down: ``node`` computes only ``fraction`` of the time.

    All its processes are stopped (SIGSTOP) and continued (SIGCONT) every 20 ms. This works on
    loopback and without root. A cgroup quota would not: the interface differs between cgroup
    versions 1 and 2 and is read-only in most containers. The stops are much shorter than the
    timeout of a heartbeat, and the kernel receives and acknowledges packets for a stopped process
    as for a busy one. Like a quota, this takes time from the node but reserves none for it: where
    ranks share cores, the node may get a larger share of the remaining time.

    >>> Straggler.parse("2:0.5")
    Straggler(node=2, fraction=0.5)
    """

    node: int
    fraction: float

    def __post_init__(self) -> None:
        """Validate the fraction."""
        if not 0 < self.fraction <= 1:
            raise ValueError(
                f"straggler: got the fraction {self.fraction:g}, expected one above 0 and at "
                "most 1; for example 2:0.5, for node 2 at half speed"
            )

    @classmethod
    def parse(cls, text: str) -> "Straggler":
        """Parse NODE:FRACTION."""
        node, fraction = _match_groups(
            "straggler", text, rf"(\d+):({_DECIMAL})", "NODE:FRACTION", "2:0.5"
        )
        return cls(int(node), float(fraction))

    def validate(self, cluster: Cluster) -> None:
        """Raise ValueError if the node does not exist."""
        _require_index("straggler", "node", self.node, cluster.nodes)

    def inject(self, control: RunControl, stop: threading.Event) -> None:
        """Stop and continue the node; each stop corrects for the actual length of earlier ones."""
        if self.fraction == 1:
            return
        ran = stopped = 0.0
        while not stop.is_set():
            ran += _timed_wait(stop, PERIOD * self.fraction)
            due = ran * (1 - self.fraction) / self.fraction - stopped
            if due > 0:
                control.signal_node(self.node, signal.SIGSTOP)
                try:
                    stopped += _timed_wait(stop, due)
                finally:
                    control.signal_node(self.node, signal.SIGCONT)


@final
@dataclass(frozen=True)
class Cut(Fault):
    """Interrupts a link: that of node ``node`` is down from ``start`` to ``end``.

    Packets sent meanwhile are lost. TCP retransmits them after 0.2 s and then with exponential
    backoff, so that a connection may take up to twice the length of the failure to recover.

    >>> Cut.parse("1@10s-15s")
    Cut(node=1, start=10.0, end=15.0)
    """

    node: int
    start: float
    end: float

    def __post_init__(self) -> None:
        """Validate the times."""
        if self.start >= self.end:
            raise ValueError(
                f"cut: got {self.start:g}-{self.end:g}, expected an end after the start; for "
                "example 1@10s-15s"
            )

    @classmethod
    def parse(cls, text: str) -> "Cut":
        """Parse NODE@START-END."""
        times = rf"({_DECIMAL})s?-({_DECIMAL})s?"
        node, start, end = _match_groups(
            "cut", text, rf"(\d+)@{times}", "NODE@START-END", "1@10s-15s"
        )
        return cls(int(node), float(start), float(end))

    def validate(self, cluster: Cluster) -> None:
        """Raise ValueError if the node does not exist."""
        _require_index("cut", "node", self.node, cluster.nodes)

    def inject(self, control: RunControl, stop: threading.Event) -> None:
        """Take the link down, and up again even if the run ends before."""
        if stop.wait(self.start):
            return
        control.set_link(self.node, False)
        control.log(f"node {self.node}: link down, until {self.end:g} s")
        try:
            stop.wait(self.end - self.start)
        finally:
            control.set_link(self.node, True)
        control.log(f"node {self.node}: link up")


@final
@dataclass(frozen=True)
class Kill(Fault):
    """Kills a rank: ``rank`` and its process group get SIGKILL at ``time``.

    >>> Kill.parse("3@20s")
    Kill(rank=3, time=20.0)
    """

    rank: int
    time: float

    @classmethod
    def parse(cls, text: str) -> "Kill":
        """Parse RANK@TIME."""
        rank, seconds = _match_groups("kill", text, rf"(\d+)@({_DECIMAL})s?", "RANK@TIME", "3@20s")
        return cls(int(rank), float(seconds))

    def validate(self, cluster: Cluster) -> None:
        """Raise ValueError if the rank does not exist."""
        _require_index("kill", "rank", self.rank, cluster.size)

    def inject(self, control: RunControl, stop: threading.Event) -> None:
        """Kill the rank at its time."""
        if not stop.wait(self.time):
            control.kill(self.rank)


def require_no_overlap(faults: Sequence[Fault]) -> None:
    """Raise ValueError for overlapping faults of one node: the end of one would end both."""
    cuts = sorted((f for f in faults if isinstance(f, Cut)), key=lambda cut: (cut.node, cut.start))
    for one, other in pairwise(cuts):
        if one.node == other.node and other.start <= one.end:
            whole = f"{one.node}@{one.start:g}-{max(one.end, other.end):g}"
            raise ValueError(
                f"cut: got two for node {one.node}, {one.start:g}-{one.end:g} and "
                f"{other.start:g}-{other.end:g}, which overlap; give one: {whole}"
            )
    slow = [fault.node for fault in faults if isinstance(fault, Straggler)]
    if twice := [node for node in slow if slow.count(node) > 1]:
        raise ValueError(f"straggler: got node {twice[0]} more than once; give it one fraction")


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


def _match_groups(what: str, text: str, pattern: str, form: str, example: str) -> tuple[str, ...]:
    match = re.fullmatch(pattern, text.strip())
    if match is None:
        raise ValueError(
            f"{what}: got {text!r}, expected {form} with numbers and times in seconds; for example "
            f"{example}"
        )
    return match.groups()


def _require_index(what: str, kind: str, number: int, count: int) -> None:
    if not 0 <= number < count:
        raise ValueError(
            f"{what}: got {kind} {number}, expected 0 to {count - 1}, since the lab has {count} of "
            "them"
        )


def _timed_wait(stop: threading.Event, seconds: float) -> float:
    """Wait, and return the actual time in seconds, which is longer on a busy machine."""
    start = time.monotonic()
    stop.wait(seconds)
    return time.monotonic() - start
