"""Writers for the statistics of a replica: JSON lines and TensorBoard."""

import contextlib
import json
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from offbeat.extras import extra
from offbeat.kit.warning import warn

Stats = dict[str, Any]  # as returned by Replica.stats()


class JsonLines(AbstractContextManager["JsonLines"]):
    r"""Appends one JSON object per call to a file; a context manager.

    If a line cannot be written, for instance because the disk is full, it warns once and writes
    nothing more: training goes on.

    >>> import tempfile, pathlib
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "run.jsonl"
    >>> with JsonLines(path) as write:
    ...     write({"step": 1, "total": {"bytes_sent": 8}}, loss=0.5)
    >>> path.read_text()
    '{"step": 1, "total": {"bytes_sent": 8}, "loss": 0.5}\n'
    """

    def __init__(self, path: str | Path) -> None:
        """Open ``path`` for appending; its folder is created."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        # Line-buffered, so that a crash loses no completed line.
        self._file = Path(path).open("a", buffering=1, encoding="utf-8")  # noqa: SIM115
        if not _ends_a_line(Path(path)):
            self._file.write("\n")  # a process was killed in the middle of it

    def __call__(self, stats: Stats, **more: Any) -> None:
        """Write ``replica.stats()`` and further values of this step as one line."""
        if self._file.closed:
            return
        try:
            self._file.write(json.dumps({**stats, **more}) + "\n")
        except OSError as error:
            self.close()
            warn(f"recording ends: {self._file.name} cannot be written ({error})")

    def close(self) -> None:
        """Close the file; a line that does not fit any more is dropped."""
        with contextlib.suppress(OSError):
            self._file.close()

    def __exit__(self, *_: object) -> None:
        """Close the file at the end of a ``with`` block."""
        self.close()


def _ends_a_line(path: Path) -> bool:
    if not path.is_file() or not path.stat().st_size:  # a pipe, or nothing yet
        return True
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


class TensorBoard(AbstractContextManager["TensorBoard"]):
    """Adds ``replica.stats()`` as scalars to a TensorBoard event file.

    It is called like :class:`JsonLines`: ``write(replica.stats(), loss=loss.item())``.
    """

    def __init__(self, folder: str | Path) -> None:
        """Create an event file in ``folder``."""
        with extra("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter
        self._writer = SummaryWriter(str(folder))

    def __call__(self, stats: Stats, **more: float) -> None:
        """Add the scalars ``last/*``, ``total/*`` and ``measures/*``, and ``more`` as ``run/*``."""
        groups = {key: stats[key] for key in ("last", "total", "measures")} | {"run": more}
        for group, values in groups.items():
            for name, value in values.items():
                self._writer.add_scalar(f"{group}/{name}", value, stats["step"])

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()

    def __exit__(self, *_: object) -> None:
        """Close the file at the end of a ``with`` block."""
        self.close()
