"""What this process holds: descriptors, threads and tensors."""

import os
import threading
import time
from collections.abc import Callable

from torch import Tensor
from torch.optim import Optimizer

BESIDE = ("Site", "Group")  # hold parameters and connections


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def threads() -> int:
    """All threads, also those of Gloo, which Python does not count."""
    return len(os.listdir("/proc/self/task"))


def left_behind() -> int:
    """The threads whose wait Gloo never ends: a rank was lost while it sent or received a part."""
    return sum(thread.name.endswith("-wait") for thread in threading.enumerate())


def settles(count: Callable[[], int], at_most: int) -> bool:
    """Whether the count falls to ``at_most``; the rank that leaves first frees last."""
    until = time.monotonic() + 60
    while count() > at_most and time.monotonic() < until:
        time.sleep(0.01)
    return count() <= at_most


def storages(root: object) -> dict[int, int]:
    """The bytes of every storage that can be reached from the attributes of our own objects."""
    seen, found, todo = set(), {}, [root]
    while todo:
        if id(part := todo.pop()) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, Tensor):
            found[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
        elif isinstance(part, dict):
            todo += part.values()
        elif isinstance(part, list | tuple):
            todo += part
        elif isinstance(part, Optimizer):
            todo += part.state.values()
        elif type(part).__module__.startswith("offbeat") and type(part).__name__ not in BESIDE:
            todo += getattr(part, "__dict__", {}).values()
    return found
