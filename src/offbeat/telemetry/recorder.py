"""The recorder of a replica: bytes, messages, stall and staleness, per step and in total."""

import itertools
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from offbeat.kit.warning import warn
from offbeat.telemetry.gradient_times import GRADIENTS_VARIABLE, GradientTimes
from offbeat.telemetry.writers import JsonLines, Stats
from offbeat.transport.meter import Meter

_replicas = itertools.count()  # numbers those of this process
FOLDER_VARIABLE = "OFFBEAT_TELEMETRY"  # environment variable: the folder for recordings


class Recorder:
    """Reads the :class:`~offbeat.transport.meter.Meter` of a replica once per step; can record it.

    If the environment variable OFFBEAT_TELEMETRY names a folder, every rank appends JSON lines to
    ``rank<r>.jsonl`` in it: one per step (times, bytes, the reported loss, and the spans of
    forward, backward, stalls and exchanges), one per held-out loss and one for ``finish``.
    If OFFBEAT_TELEMETRY_GRADIENTS is set too, a step also has the sizes of ``parameters``, when
    each gradient was ready, the peak of memory and the kind of the device
    (:class:`~.gradient_times.GradientTimes`).
    Otherwise it only reads the counters. :mod:`~offbeat.telemetry.recording` reads the files.
    """

    def __init__(self, meter: Meter, about: Stats, parameters: Mapping[str, Tensor]) -> None:
        """Start counting; ``about`` holds "rank" and "nodes", and begins a recording."""
        self.meter = meter
        self.loss: float | Tensor | None = None
        self._number = next(_replicas)
        self._write: JsonLines | None = None
        self._gradients: GradientTimes | None = None
        if os.environ.get(FOLDER_VARIABLE):
            self._write = _open(Path(os.environ[FOLDER_VARIABLE]) / f"rank{about['rank']}.jsonl")
        if self._write is not None:
            self._record("attached", **about)
            meter.spans = []
            if os.environ.get(GRADIENTS_VARIABLE):
                self._gradients = GradientTimes(parameters)
        self.last: dict[str, float] = {}
        self.computed = 0.0, 0.0  # seconds of forward and of backward in the last step
        self._before, self._sent = meter.totals(), dict(meter.bytes_sent)
        self._time, self._choosing, self._has_finished = time.perf_counter(), 0.0, False

    def backward(self, first: float, last: float) -> None:
        """Record the times of the first and the last gradient of a backward, in perf_counter().

        The interval from the start of the step to the first gradient counts as forward.
        """
        self.computed = max(0.0, first - self._time), last - first
        if first > self._time:
            self.meter.span("forward", self._time, first)
            self.meter.span("backward", first, last)

    def stepped(self, staleness: int, measures: Callable[[], Stats], weight: float | None) -> None:
        """Record the counters of a step; ``measures`` is called only while recording.

        ``weight``: what the step stands for, in a run with weights.
        """
        now, ended, totals = time.perf_counter(), time.time(), self.meter.totals()
        self.last = {key: totals[key] - self._before[key] for key in totals}
        self.last |= {"seconds": now - self._time, "staleness": staleness}
        if self._write is not None:
            spans = [
                (kind, a - self._time, b - self._time) for kind, a, b in self.meter.spans or ()
            ]
            loss = None if self.loss is None else float(self.loss)
            # A copy, since the thread of a lane may add an axis meanwhile.
            totals_by_axis = dict(self.meter.bytes_sent).items()
            sent = {axis: count - self._sent.get(axis, 0) for axis, count in totals_by_axis}
            more = {"bytes_by_axis": sent, "loss": loss, "spans": spans, "measures": measures()}
            more |= {} if weight is None else {"weight": weight}
            more |= {"choosing": self._choosing} if self._choosing else {}
            if self._gradients is not None:
                more |= self._gradients.take(since=self._time)
            self._record("step", time=ended, **self.last, **more)
            self.loss = None
        self._choosing, self._has_finished = 0.0, False
        self.restart()

    def restart(self) -> None:
        """Start the next step now: time and bytes since the last step are not counted."""
        self._before, self._sent = self.meter.totals(), dict(self.meter.bytes_sent)
        self._time = time.perf_counter()
        if self.meter.spans is not None:
            self.meter.spans = []

    def count_choice(self) -> None:
        """Add the time since the last step to ``choosing`` of the next one, which starts now."""
        self._choosing += time.perf_counter() - self._time
        self.restart()

    def report(self, loss: float | Tensor, kind: str) -> None:
        """Record a loss: ``kind`` is "train" for this step's, or "heldout".

        Raises ValueError for another kind, or a tensor with more than one element.
        """
        if kind not in ("train", "heldout"):
            raise ValueError(f"kind: got {kind!r}, expected 'train' or 'heldout'")
        if isinstance(loss, Tensor) and loss.numel() != 1:
            raise ValueError(
                f"loss: got a tensor of shape {tuple(loss.shape)}, expected one number; report "
                "loss.mean()"
            )
        loss = loss.detach() if isinstance(loss, Tensor) else loss
        if kind == "train":
            self.loss = loss
        elif self._write is not None:
            self._record(kind, loss=float(loss))

    def finished(self, distance: dict[str, float]) -> None:
        """Record the distance of the replicas from their average, before the first ``finish()``."""
        if not self._has_finished:
            self._record("finish", consensus_distance=distance)
        self._has_finished = True

    def switched(self, **algorithm: str) -> None:
        """Record that another algorithm goes on; that was a choice, if one was made just before."""
        self._record("switched", **algorithm)
        if self._choosing:
            self.count_choice()
        else:
            self.restart()

    def decided(self, decision: Stats) -> None:
        """Record how a run has chosen its algorithm, and by which figures."""
        self._record("decided", **decision)
        self.count_choice()

    def close(self) -> None:
        """Close the recording; further events are not recorded."""
        if self._gradients is not None:
            self._gradients.remove()
        if self._write is not None:
            self._write.close()
            self._write = None

    def stats(self) -> Stats:
        """Return the counters of the last step, in total and by axis; no communication."""
        return {
            "last": dict(self.last),
            "total": self.meter.totals(),
            "bytes_by_axis": dict(self.meter.bytes_sent),
        }

    def _record(self, event: str, **more: Any) -> None:
        if self._write is not None:
            self._write({"event": event, "time": time.time(), "replica": self._number}, **more)


def _open(path: Path) -> JsonLines | None:
    """Open a recording, or warn: other ranks train, and must not wait for this one."""
    try:
        return JsonLines(path)
    except OSError as error:
        warn(f"no recording: cannot write {path} ({error})")
        return None
