"""Imports of torch in the command line, which take seconds."""

import contextlib
import os
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """End the program quietly, with exit code 130, on Ctrl-C: imports swallow the exception."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # not of a job that ignores Ctrl-C
        signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
