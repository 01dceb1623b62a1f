"""Where statistics go: JSON lines, TensorBoard."""

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

Stats = dict[str, Any]


class JsonLines(AbstractContextManager["JsonLines"]):
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

    def __exit__(self, *_: object) -> None:
        """Close the file at the end of a ``with`` block."""
        self.close()


class TensorBoard(AbstractContextManager["TensorBoard"]):
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
        """Write one step's scalars: ``last``, ``total``, ``measures``, and your own."""
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
