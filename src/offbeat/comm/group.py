"""One process group whose waits end and whose bytes are counted."""

import atexit
import contextlib
import threading
import weakref
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch.distributed import ProcessGroup

from offbeat.comm.heartbeat import Heartbeat
from offbeat.comm.lane import Lane
from offbeat.comm.meter import Meter
from offbeat.comm.process_group import backends_of
from offbeat.comm.world import Axis

_groups: "weakref.WeakSet[Group]" = weakref.WeakSet()
_DROPPERS = 8  # threads: ending a group takes some 10 ms, nearly all of it waiting


@dataclass(eq=False)
class Group:
    """A process group whose waits end, and whose bytes are counted.

    ``ranks`` are the members' ranks in the world, in group order. ``alike`` is what the members
    have asked each other, and whether all gave the same answer.
    """

    process_group: ProcessGroup
    ranks: tuple[int, ...]
    axis: Axis
    heartbeat: Heartbeat
    meter: Meter
    closed: bool = False
    alike: dict[str, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Remember to let go of the process group before Python ends."""
        _groups.add(self)

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        return self.process_group.rank()

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self.ranks)

    def backend(self, device: torch.device | str) -> str:
        """The name of the backend that carries tensors on ``device``; "" where there is none."""
        return self._backends.get(torch.device(device).type, "")

    @cached_property
    def _backends(self) -> dict[str, str]:
        return {device.type: name for device, name in backends_of(self.process_group).items()}

    @cached_property
    def lane(self) -> Lane:
        """The one thread that runs this group's longer exchanges; never two."""
        return Lane(f"offbeat-{self.axis}", lambda: self.heartbeat.release(self.process_group))


def message_device(group: Group, device: torch.device | str = "cpu") -> torch.device:
    """Where messages about tensors on ``device`` must live.

    Gloo sends no point-to-point messages from a GPU: they go through the host.
    """
    device = torch.device(device)
    if "nccl" not in (group.backend(device), group.backend("cuda")):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cpu" else device


def close_sockets(groups: Iterable[Group]) -> None:
    """Let go of process groups, which ends the threads of Gloo; several at a time.

    A closed socket takes away what a peer has yet to read: only for groups of which all members
    are through. And not in this thread: one that still waits for a peer would keep us.
    """
    dropped = []
    for group in groups:
        _groups.discard(group)
        group.heartbeat.forget_groups()
        dropped.append(group.process_group)
        del group.process_group
    threads = [
        threading.Thread(target=_empty, args=(dropped,), daemon=True) for _ in dropped[:_DROPPERS]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        left = -1
        while thread.is_alive() and len(dropped) != left:  # until a while goes by without progress
            left = len(dropped)
            thread.join(timeout=5.0)


def closed_among(process_groups: Collection[ProcessGroup]) -> list[Group]:
    """Those groups whose replica has been detached."""
    return [g for g in _groups if g.closed and g.process_group in process_groups]


@atexit.register
def _drop_all() -> None:
    """Let go of all process groups before Python ends.

    A thread of Gloo's that lets go of a tensor after Python has ended aborts the process.
    """
    close_sockets(list(_groups))


def _empty(dropped: list[ProcessGroup]) -> None:
    with contextlib.suppress(IndexError):  # another thread had the last
        while dropped:
            dropped.pop()
