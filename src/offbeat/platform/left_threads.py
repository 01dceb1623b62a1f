"""Daemon threads that were left in a call which does not end, until Python ends."""

import threading
import time
import weakref

_left = weakref.WeakSet[threading.Thread]()


def leave(thread: threading.Thread) -> None:
    """Await ``thread`` no longer, before Python ends."""
    _left.add(thread)


def await_left(patience: float = 1.0) -> None:
    """Wait for threads that were left, whose calls end with the connections of this process.

    One that returns from a call of C++ while the interpreter finalizes aborts the process.
    """
    until = time.monotonic() + patience
    for thread in [*_left]:
        thread.join(max(0.0, until - time.monotonic()))
