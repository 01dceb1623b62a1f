"""What an exchange costs: bytes, messages, waiting and staleness, per step and in total."""

import json
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from offbeat.meter import Meter

Stats = dict[str, Any]


class Telemetry:
    """Reads a replica's :class:`~offbeat.meter.Meter` once a step."""

    def __init__(self, meter: Meter) -> None:
        """Start counting from here."""
        self.meter = meter
        self.last: dict[str, float] = {}
        self._before = meter.totals()
        self._time = time.perf_counter()

    def stepped(self, staleness: int) -> None:
        """Note what this step added."""
        now, totals = time.perf_counter(), self.meter.totals()
        self.last = {key: totals[key] - self._before[key] for key in totals}
        self.last |= {"seconds": now - self._time, "staleness": staleness}
        self._before, self._time = totals, now

    def stats(self) -> Stats:
        """Numbers for people and files; no communication."""
        return {
            "last": dict(self.last),
            "total": self.meter.totals(),
            "bytes_by_axis": dict(self.meter.bytes_sent),
        }


class JsonLines:
    r"""Appends one JSON object a call to a file.

    >>> import tempfile, pathlib
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "run.jsonl"
    >>> with JsonLines(path) as write:
    ...     write({"step": 1, "total": {"bytes_sent": 8}}, loss=0.5)
    >>> path.read_text()
    '{"step": 1, "total": {"bytes_sent": 8}, "loss": 0.5}\n'
    """

    def __init__(self, path: str | Path) -> None:
        """Open ``path`` for appending; its folder is made."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        # Open as long as this object is; line by line, so that a crash loses nothing.
        self._file = Path(path).open("a", buffering=1, encoding="utf-8")  # noqa: SIM115

    def __call__(self, stats: Stats, **more: Any) -> None:
        """Write ``replica.stats()`` and whatever else belongs to this step."""
        self._file.write(json.dumps({**stats, **more}) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        """Use as a context manager."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the file."""
        self.close()


class TensorBoard:
    """Writes the numbers of ``replica.stats()`` as scalars; needs the tensorboard package.

    Call it like :class:`JsonLines`: ``write(replica.stats(), loss=loss.item())``.
    """

    def __init__(self, folder: str | Path) -> None:
        """Open an event file in ``folder``."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(
                "tensorboard is not installed; run: pip install 'offbeat[tensorboard]'"
            ) from error
        self._writer = SummaryWriter(str(folder))

    def __call__(self, stats: Stats, **more: float) -> None:
        """Write one step's scalars: ``last`` and ``total`` of the stats, and your own."""
        groups = {"last": stats["last"], "total": stats["total"], "run": more}
        for group, values in groups.items():
            for name, value in values.items():
                self._writer.add_scalar(f"{group}/{name}", value, stats["step"])

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()
