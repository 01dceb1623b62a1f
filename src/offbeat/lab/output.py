"""Where what the ranks print goes: line by line to a callback, or to one file a rank."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

OnLine = Callable[[int | None, str], None]  # the rank, or None for the lab itself; the line


@final
@dataclass
class Output:
    """Collects the output of all ranks; calls ``on_line`` for one line at a time.

    With a ``log_dir`` each rank writes to its own file there, and ``on_line`` gets only what the
    lab itself says.
    """

    on_line: OnLine
    log_dir: Path | None = None
    _threads: list[threading.Thread] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _error: BaseException | None = None

    def __post_init__(self) -> None:
        """Make the folder."""
        if self.log_dir is not None:
            try:
                self.log_dir.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ValueError(
                    f"log directory: got {str(self.log_dir)!r}, which cannot be made "
                    f"({error.strerror}); name a folder, or one that does not exist yet"
                ) from error

    @contextlib.contextmanager
    def sink(self, rank: int) -> Iterator[int]:
        """A file descriptor for a rank's process to inherit; ours is closed behind it."""
        if self.log_dir is not None:
            with (self.log_dir / f"rank{rank}.log").open("wb") as file:
                yield file.fileno()
            return
        reading, writing = os.pipe()
        thread = threading.Thread(
            target=self._read, args=(rank, reading), name=f"offbeat-lab-output-{rank}", daemon=True
        )
        thread.start()
        self._threads.append(thread)
        try:
            yield writing
        finally:
            os.close(writing)

    def tell(self, line: str) -> None:
        """A line of the lab's own."""
        self._give(None, line)

    def raise_error(self) -> None:
        """Raise what ``on_line`` has raised."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Wait until everything that was printed has been passed on."""
        # Bounded: something that has left its rank's process group may hold the pipe open.
        for thread in self._threads:
            thread.join(timeout=1.0)

    def _read(self, rank: int, descriptor: int) -> None:
        # Universal newlines: a progress bar's carriage return ends a line too.
        with open(descriptor, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                self._give(rank, line.rstrip("\n"))

    def _give(self, rank: int | None, line: str) -> None:
        with self._lock:
            if self._error is not None:
                return  # go on reading: a rank that cannot write would never end
            try:
                self.on_line(rank, line)
            except BaseException as error:
                self._error = error
