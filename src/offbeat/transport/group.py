"""Process groups with failure detection and byte counters, and the closing of their sockets."""

import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch.distributed import ProcessGroup

from offbeat.liveness.failure import NoHeartbeat
from offbeat.liveness.heartbeats.heartbeat import Heartbeat
from offbeat.liveness.lane import Lane
from offbeat.platform.device import current_accelerator
from offbeat.platform.left_threads import await_left, leave
from offbeat.platform.peers import is_mesh
from offbeat.platform.process_group import (
    backends_of,
    connections_of,
    default_group,
    end_waits,
    leave_to_parent,
    world_ranks,
)
from offbeat.platform.round_trip import FAR, round_trip
from offbeat.transport.meter import Meter
from offbeat.transport.world import Axis

_owned: "weakref.WeakSet[Group]" = weakref.WeakSet()
_owning = threading.Lock()  # a rank may open groups while a thread closes those of another replica
_adapted: "weakref.WeakKeyDictionary[ProcessGroup, Group]" = weakref.WeakKeyDictionary()
_adapting = threading.Lock()
ENDING, LEFT = 5.0, 0.1  # seconds for which the end of a thread is awaited
_DROPPERS = 8  # threads: ending a group takes some 10 ms, nearly all of it waiting


class InFlight(Protocol):
    """Holds works of torch until they were waited for."""

    def drop(self) -> None:
        """Drop the works, since nobody will wait for them any more."""


@dataclass(eq=False)
class Group:
    """Wraps a process group with failure detection, counters and a thread of its own.

    Attributes:
        process_group: the process group of torch.
        ranks: the members' ranks in the world, in group order.
        axis: "world", "node" (between nodes) or "local" (inside one), for the counters.
        detector: what ends the waits of this group.
        meter: counts bytes, messages and stalled seconds.
        connected: the members that are connected to this one; None for all.
        closed: whether the replica that opened this group has been detached.
        alike: questions that the members have compared their answers to, and whether all answers
            were equal.
        in_flight: what holds works of torch, each of which keeps the sockets open.
        owed: waits for messages that nobody needed yet.
    """

    process_group: ProcessGroup
    ranks: tuple[int, ...]
    axis: Axis
    detector: Heartbeat | NoHeartbeat
    meter: Meter
    connected: Collection[int] | None = None
    closed: bool = False
    alike: dict[str, bool] = field(default_factory=dict)
    in_flight: "weakref.WeakSet[InFlight]" = field(default_factory=weakref.WeakSet)
    owed: Callable[[], object] | None = None

    @classmethod
    def of(cls, process_group: ProcessGroup | None = None) -> "Group":
        """Adapt a process group that the caller owns, by default torch's default group.

        Waits end by the timeout of the process group (:class:`NoHeartbeat`). The same process
        group gives the same Group, for as long as the caller keeps it. Raises ``ValueError`` if
        this rank is not a member, or if there is no default group.
        """
        owner = default_group() if process_group is None else process_group
        if not isinstance(owner, ProcessGroup):
            raise ValueError(
                f"group={process_group!r}, expected a torch.distributed.ProcessGroup of which "
                "this rank is a member; call on the members only"
            )
        with _adapting:
            group = _adapted.get(owner)
            if group is None:
                ranks = world_ranks(owner)
                detector = NoHeartbeat(ranks[owner.rank()], ranks)
                # A proxy: a reference from here would keep the process group alive indefinitely.
                group = cls(weakref.proxy(owner), ranks, "world", detector, Meter())
                _adapted[owner] = group
                weakref.finalize(owner, group.close_lane).atexit = False  # lanes close themselves
        return group

    @property
    def rank(self) -> int:
        """The number of this rank in the group, from 0."""
        return self.process_group.rank()

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self.ranks)

    def backend(self, device: torch.device | str) -> str:
        """Return the name of the backend for tensors on ``device``, or ""."""
        return self._backends.get(torch.device(device).type, "")

    @cached_property
    def _backends(self) -> dict[str, str]:
        return {device.type: name for device, name in backends_of(self.process_group).items()}

    @cached_property
    def is_mesh(self) -> bool:
        """Whether it is so small that all pairs of members are connected; the same on all."""
        return is_mesh(self.size, self.connections)

    @cached_property
    def is_far(self) -> bool:
        """Whether this process has a connection to somewhere far away; members may differ."""
        return round_trip() >= FAR

    @cached_property
    def connections(self) -> int:
        """How many connections two members have, over which large messages are divided."""
        return connections_of(self.process_group)

    @cached_property
    def lane(self) -> Lane:
        """The one thread that runs this group's longer exchanges; never two."""
        return Lane(f"offbeat-{self.axis}", self._end_waits)

    @cached_property
    def waiter(self) -> Lane:
        """The thread that waits for messages of Gloo; left behind by a wait that does not end."""
        return Lane(f"offbeat-{self.axis}-wait", self._end_waits)

    def settle(self) -> None:
        """Wait for messages that nobody has waited for."""
        if self.owed is not None:
            self.owed()
        self.owed = None

    def _end_waits(self) -> None:
        self.detector.release(self.process_group, self.connected)

    def close_lane(self) -> None:
        """End the threads, if they were started."""
        # After an agreed error they have ended, or wait for what never comes.
        patience = LEFT if self.detector.has_agreed_error else ENDING
        for name in ("lane", "waiter"):
            if name in vars(self):
                getattr(self, name).close(patience)


def close_at_exit(group: Group) -> None:
    """Close the sockets of ``group``, which offbeat has opened, before Python ends."""
    with _owning:
        _owned.add(group)


def message_device(group: Group, device: torch.device | str = "cpu") -> torch.device:
    """Return the device on which messages about tensors on ``device`` must be allocated.

    Gloo sends no point-to-point messages from an accelerator: they go through the host. Values of
    the host go to the accelerator where the group has no backend for the host.
    """
    device = torch.device(device)
    if device.type == "cpu" and not group.backend("cpu"):
        return current_accelerator()
    return device if group.backend(device) not in ("", "gloo") else torch.device("cpu")


def close_sockets(groups: Iterable[Group], *, is_over: bool = False) -> None:
    """Drop process groups, which closes their sockets and ends the threads of Gloo.

    Only for groups of which all members are done: a closed socket discards what a peer has not
    read yet. ``is_over``: all of them are known to have received all messages. In threads of their
    own, since the end of a group that waits for a peer would block the caller.
    """
    dropped = []
    with _owning:
        open_groups = [group for group in groups if group in _owned]
        _owned.difference_update(open_groups)
    for group in open_groups:
        group.detector.forget(group.process_group)
        for holder in list(group.in_flight):
            holder.drop()
        dropped.append((group.process_group, group.connected))
        del group.process_group
    given = dropped, is_over
    threads = [
        threading.Thread(target=_empty, args=given, daemon=True) for _ in dropped[:_DROPPERS]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        left = -1
        while thread.is_alive() and len(dropped) != left:  # until 5 s go by without progress
            left = len(dropped)
            thread.join(timeout=5.0)
        if thread.is_alive():
            leave(thread)


def closed_among(process_groups: Collection[ProcessGroup]) -> list[Group]:
    """Return the groups over ``process_groups`` whose replica has been detached."""
    with _owning:
        return [g for g in _owned if g.closed and g.process_group in process_groups]


@atexit.register
def _drop_all() -> None:
    """Drop all process groups before Python ends.

    A thread of Gloo that frees a tensor after Python has ended aborts the process.
    """
    close_sockets(list(_owned))
    await_left()


def _leave_all_to_parent() -> None:
    global _owning
    _owning = threading.Lock()  # a thread that is not in the child may have held it
    if _owned:
        leave_to_parent([group.process_group for group in _owned])
        _owned.clear()


os.register_at_fork(after_in_child=_leave_all_to_parent)


def _empty(dropped: list[tuple[ProcessGroup, Collection[int] | None]], is_over: bool) -> None:
    with contextlib.suppress(IndexError):  # another thread had the last
        while dropped:
            group, connected = dropped.pop()
            # A group ends only after its works. And Gloo ends a lazy group's thread before its
            # sockets, once none has anything to read: never with a message in flight.
            end_waits(group, connected, is_over=is_over)
            del group
