"""What one replica has sent and how long it has waited."""

import threading
from dataclasses import dataclass, field

Span = tuple[str, float, float]  # kind, start, end


@dataclass
class Meter:
    """Counters that every exchange adds to; :mod:`offbeat.telemetry` reads them.

    ``bytes_sent`` is what leaves this rank, per axis ("world", "node" between nodes, "local"
    inside one): collectives count what their ring sends. ``seconds_stalled`` is the time the
    host spent blocked in waits of the training loop; waits on CUDA order streams instead.
    """

    bytes_sent: dict[str, int] = field(default_factory=dict)
    messages: int = 0
    seconds_stalled: float = 0.0
    spans: list[Span] | None = None  # what happened when, while somebody records
    _lock: threading.Lock = field(init=False, repr=False, default_factory=threading.Lock)

    def sent(self, axis: str, count: int, messages: int = 1) -> None:
        """Count one launched exchange."""
        with self._lock:  # lanes count too
            self.bytes_sent[axis] = self.bytes_sent.get(axis, 0) + count
            self.messages += messages

    def span(self, kind: str, start: float, end: float) -> None:
        """Note what went on between two readings of ``time.perf_counter()``, if recording."""
        if self.spans is not None:
            self.spans.append((kind, start, end))

    def totals(self) -> dict[str, float]:
        """The counters as plain numbers."""
        return {
            "bytes_sent": sum(self.bytes_sent.values()),
            "messages": self.messages,
            "seconds_stalled": self.seconds_stalled,
        }
