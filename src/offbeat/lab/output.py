"""The output of the ranks: passed line by line to a callback, or written to one file per rank."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

OnLine = Callable[[int | None, str], None]  # (rank, or None for messages of the lab; line)


@final
@dataclass
class Output:
    """Collects the output of all ranks; calls ``on_line`` for one line at a time.

    With a ``log_dir`` each rank writes to its own file in that folder, and ``on_line`` gets only
    the messages of the lab. Raises ValueError if the folder cannot be created.
    """

    on_line: OnLine
    log_dir: Path | None = None
    _threads: list[threading.Thread] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _error: BaseException | None = None

    def __post_init__(self) -> None:
        """Create the folder."""
        if self.log_dir is not None:
            try:
                self.log_dir.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ValueError(
                    f"log directory: got {str(self.log_dir)!r}, which cannot be created "
                    f"({error.strerror}); pass a folder, or a path that does not exist yet"
                ) from error

    @contextlib.contextmanager
    def sink(self, rank: int) -> Iterator[int]:
        """Yield a file descriptor for the process of a rank to inherit; closes it afterwards."""
        if self.log_dir is not None:
            path = self.log_dir / f"rank{rank}.log"
            try:
                file = path.open("wb")
            except OSError as error:
                raise ValueError(
                    f"log directory: cannot write {str(path)!r} ({error.strerror}); remove it, or "
                    "pass another folder"
                ) from error
            with file:
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

    def log(self, line: str) -> None:
        """Pass a message of the lab to ``on_line``."""
        self._emit(None, line)

    def raise_error(self) -> None:
        """Raise the exception that ``on_line`` has raised in a reader thread, if any."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Wait until all output has been passed on."""
        # Bounded: a process that has left the process group of its rank may hold the pipe open.
        for thread in self._threads:
            thread.join(timeout=1.0)

    def _read(self, rank: int, descriptor: int) -> None:
        # Universal newlines: the carriage return of a progress bar ends a line too.
        with open(descriptor, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                self._emit(rank, line.rstrip("\n"))

    def _emit(self, rank: int | None, line: str) -> None:
        with self._lock:
            if self._error is not None:
                return  # but keep reading: a rank whose pipe is full would block indefinitely
            try:
                self.on_line(rank, line)
            except BaseException as error:
                self._error = error
