"""Counters of one replica: bytes and messages sent, seconds stalled."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

Span = tuple[str, float, float]  # kind, start and end in seconds of time.perf_counter()


@dataclass
class Meter:
    """Counters that every exchange adds to and :mod:`offbeat.telemetry` reads.

    Attributes:
        bytes_sent: bytes that leave this rank, per axis ("world", "node" between nodes, "local"
            inside one); for a collective, what a ring algorithm sends.
        messages: launched messages and collectives.
        seconds_stalled: time that the training thread was blocked in waits. Waits on CUDA order
            streams and block no thread.
        spans: intervals of a step while telemetry records them, else None.
    """

    bytes_sent: dict[str, int] = field(default_factory=dict)
    messages: int = 0
    seconds_stalled: float = 0.0
    spans: list[Span] | None = None
    _lock: threading.Lock = field(init=False, repr=False, default_factory=threading.Lock)

    def sent(self, axis: str, count: int, messages: int = 1) -> None:
        """Count a launched exchange of ``count`` bytes."""
        with self._lock:  # groups' own threads count too
            self.bytes_sent[axis] = self.bytes_sent.get(axis, 0) + count
            self.messages += messages

    def span(self, kind: str, start: float, end: float) -> None:
        """Append an interval between two readings of ``time.perf_counter()``, if recording."""
        if self.spans is not None:
            self.spans.append((kind, start, end))

    @contextmanager
    def timing(self, kind: str) -> Iterator[None]:
        """Append the interval of the block, if recording."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.span(kind, start, time.perf_counter())

    def totals(self) -> dict[str, float]:
        """Return the counters, with the bytes summed over the axes."""
        return {
            "bytes_sent": sum(self.bytes_sent.values()),
            "messages": self.messages,
            "seconds_stalled": self.seconds_stalled,
        }
