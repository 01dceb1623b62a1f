"""What an exchange costs: bytes, messages, waiting and staleness, per step and in total."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from offbeat.comm.meter import Meter
from offbeat.telemetry.writers import JsonLines, Stats

FOLDER_VARIABLE = "OFFBEAT_TELEMETRY"  # environment: where every rank records, one file each


class Recorder:
    """Reads a replica's :class:`~offbeat.comm.meter.Meter` once a step, and records it if asked to.

    With a folder in the environment variable OFFBEAT_TELEMETRY every rank appends JSON lines to
    ``rank<r>.jsonl`` there: one for each step (times, bytes, reported loss, spans of waiting and
    of messages on the wire), reported held-out loss and ``finish``. Costs nothing otherwise.
    """

    def __init__(self, meter: Meter, about: Stats) -> None:
        """Start counting from here; ``about`` is what a recording begins with."""
        self.meter = meter
        self.loss: float | Tensor | None = None
        self._write: JsonLines | None = None
        if os.environ.get(FOLDER_VARIABLE):
            self._write = JsonLines(
                Path(os.environ[FOLDER_VARIABLE]) / f"rank{about['rank']}.jsonl"
            )
            self._record("attached", **about)
            meter.spans = []
        self.last: dict[str, float] = {}
        self._before, self._sent = meter.totals(), dict(meter.bytes_sent)
        self._time = time.perf_counter()

    def backward(self, first: float, last: float) -> None:
        """Note when gradients became ready: before that is forward, after it the optimizer."""
        if first > self._time:
            self.meter.span("forward", self._time, first)
            self.meter.span("backward", first, last)

    def stepped(self, staleness: int, measures: Callable[[], Stats]) -> None:
        """Note what this step added; ``measures`` are asked for only while recording."""
        now, totals = time.perf_counter(), self.meter.totals()
        self.last = {key: totals[key] - self._before[key] for key in totals}
        self.last |= {"seconds": now - self._time, "staleness": staleness}
        if self._write is not None:
            spans = [
                (kind, a - self._time, b - self._time) for kind, a, b in self.meter.spans or ()
            ]
            loss = None if self.loss is None else float(self.loss)
            sent = {
                axis: count - self._sent.get(axis, 0)
                for axis, count in dict(self.meter.bytes_sent).items()  # a lane may add one
            }
            more = {"bytes_by_axis": sent, "loss": loss, "spans": spans, "measures": measures()}
            self._record("step", **self.last, **more)
            self.loss = None
        self.restart()

    def restart(self) -> None:
        """The next step begins now: what went on since the last one was no training."""
        self._before, self._sent = self.meter.totals(), dict(self.meter.bytes_sent)
        self._time = time.perf_counter()
        if self.meter.spans is not None:
            self.meter.spans = []

    def report(self, loss: float | Tensor, kind: str) -> None:
        """Take down a loss: this step's, or one on held-out data."""
        if kind not in ("train", "heldout"):
            raise ValueError(f"kind={kind!r}, expected 'train' or 'heldout'")
        if isinstance(loss, Tensor) and loss.numel() != 1:
            raise ValueError(
                f"the loss is a tensor of shape {tuple(loss.shape)}, expected one number; report "
                "loss.mean()"
            )
        loss = loss.detach() if isinstance(loss, Tensor) else loss
        if kind == "train":
            self.loss = loss
        elif self._write is not None:
            self._record(kind, loss=float(loss))

    def finished(self, distance: dict[str, float]) -> None:
        """Note how far apart the replicas were just before they were made equal."""
        self._record("finish", consensus_distance=distance)

    def close(self) -> None:
        """End the recording."""
        if self._write is not None:
            self._write.close()
            self._write = None

    def stats(self) -> Stats:
        """Numbers for people and files; no communication."""
        return {
            "last": dict(self.last),
            "total": self.meter.totals(),
            "bytes_by_axis": dict(self.meter.bytes_sent),
        }

    def _record(self, event: str, **more: Any) -> None:
        if self._write is not None:
            self._write({"event": event, "time": time.time()}, **more)
