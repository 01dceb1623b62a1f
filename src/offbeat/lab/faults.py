"""What can go wrong in a lab: slow nodes, cut links, killed ranks."""

import re
import signal
import threading
import time
from dataclasses import dataclass
from typing import final

from offbeat.lab.cluster import Cluster
from offbeat.lab.fault import Fault, Reach

PERIOD = 0.02  # seconds between two halts of a slow node
_DECIMAL = r"\d+\.?\d*|\.\d+"


@final
@dataclass(frozen=True)
class Straggler(Fault):
    """Node ``node`` computes only ``fraction`` of the time.

    All its processes are halted and continued every 20 ms. That needs no cgroup, whose CPU
    controller is version 1 here, version 2 there, and read-only in most containers; it works on
    loopback and without root. Halts are far shorter than what a heartbeat tolerates, and the
    kernel goes on to receive and acknowledge for a halted process, as for a busy one. Like a
    quota, it takes time from the node but reserves none for it: where ranks share cores, a
    straggler is slower than alone, but the others may leave it more than their part.

    >>> Straggler.parse("2:0.5")
    Straggler(node=2, fraction=0.5)
    """

    node: int
    fraction: float

    def __post_init__(self) -> None:
        """Check the fraction."""
        if not 0 < self.fraction <= 1:
            raise ValueError(
                f"straggler: got the fraction {self.fraction:g}, expected one above 0 and at "
                "most 1; for example 2:0.5 for node 2 at half speed"
            )

    @classmethod
    def parse(cls, text: str) -> "Straggler":
        """Read NODE:FRACTION."""
        node, fraction = _parse("straggler", text, rf"(\d+):({_DECIMAL})", "NODE:FRACTION", "2:0.5")
        return cls(int(node), float(fraction))

    def check(self, world: Cluster) -> None:
        """The node must exist."""
        _check("straggler", "node", self.node, world.nodes)

    def play(self, reach: Reach, stop: threading.Event) -> None:
        """Halt and continue; every halt makes up for how long the last ones really took."""
        if self.fraction == 1:
            return
        ran = halted = 0.0
        while not stop.is_set():
            ran += _wait(stop, PERIOD * self.fraction)
            due = ran * (1 - self.fraction) / self.fraction - halted
            if due > 0:
                reach.signal_node(self.node, signal.SIGSTOP)
                try:
                    halted += _wait(stop, due)
                finally:
                    reach.signal_node(self.node, signal.SIGCONT)


@final
@dataclass(frozen=True)
class Cut(Fault):
    """The link of node ``node`` is down from ``start`` to ``end``.

    What is sent meanwhile is lost; TCP sends it again, first a fifth of a second later and then
    ever more rarely, so that connections come back up to twice as long after their loss.

    >>> Cut.parse("1@10s-15s")
    Cut(node=1, start=10.0, end=15.0)
    """

    node: int
    start: float
    end: float

    def __post_init__(self) -> None:
        """Check the times."""
        if self.start >= self.end:
            raise ValueError(
                f"cut: got {self.start:g}-{self.end:g}, which ends before it starts; for example "
                "1@10s-15s"
            )

    @classmethod
    def parse(cls, text: str) -> "Cut":
        """Read NODE@START-END."""
        times = rf"({_DECIMAL})s?-({_DECIMAL})s?"
        node, start, end = _parse("cut", text, rf"(\d+)@{times}", "NODE@START-END", "1@10s-15s")
        return cls(int(node), float(start), float(end))

    def check(self, world: Cluster) -> None:
        """The node must exist."""
        _check("cut", "node", self.node, world.nodes)

    def play(self, reach: Reach, stop: threading.Event) -> None:
        """Take the link down, and up again in any case."""
        if stop.wait(self.start):
            return
        reach.set_link(self.node, False)
        reach.tell(f"node {self.node}: link down, until {self.end:g} s")
        try:
            stop.wait(self.end - self.start)
        finally:
            reach.set_link(self.node, True)
        reach.tell(f"node {self.node}: link up")


@final
@dataclass(frozen=True)
class Kill(Fault):
    """Rank ``rank`` and all it has started get SIGKILL at ``time``.

    >>> Kill.parse("3@20s")
    Kill(rank=3, time=20.0)
    """

    rank: int
    time: float

    @classmethod
    def parse(cls, text: str) -> "Kill":
        """Read RANK@TIME."""
        rank, seconds = _parse("kill", text, rf"(\d+)@({_DECIMAL})s?", "RANK@TIME", "3@20s")
        return cls(int(rank), float(seconds))

    def check(self, world: Cluster) -> None:
        """The rank must exist."""
        _check("kill", "rank", self.rank, world.size)

    def play(self, reach: Reach, stop: threading.Event) -> None:
        """Wait, and kill."""
        if not stop.wait(self.time):
            reach.kill(self.rank)


def _parse(what: str, text: str, pattern: str, form: str, example: str) -> tuple[str, ...]:
    match = re.fullmatch(pattern, text.strip())
    if match is None:
        raise ValueError(
            f"{what}: got {text!r}, expected {form} with numbers, times in seconds; for example "
            f"{example}"
        )
    return match.groups()


def _check(what: str, kind: str, number: int, count: int) -> None:
    if not 0 <= number < count:
        raise ValueError(
            f"{what}: got {kind} {number}, but there are {count}, numbered from 0; "
            f"expected 0 to {count - 1}"
        )


def _wait(stop: threading.Event, seconds: float) -> float:
    """Wait; how long it really took, which is longer on a busy machine."""
    start = time.monotonic()
    stop.wait(seconds)
    return time.monotonic() - start
