"""What this process holds: descriptors and threads."""

import os
import time
from collections.abc import Callable


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def threads() -> int:
    """All threads, also those of Gloo, which Python does not count."""
    return len(os.listdir("/proc/self/task"))


def settles(count: Callable[[], int], at_most: int) -> bool:
    """Whether the count falls to ``at_most``; the rank that leaves first frees last."""
    until = time.monotonic() + 5
    while count() > at_most and time.monotonic() < until:
        time.sleep(0.01)
    return count() <= at_most
