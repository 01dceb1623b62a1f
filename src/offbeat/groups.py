"""Which rank sits on which node, and the process groups that follow from it."""

import atexit
import contextlib
import itertools
import os
import socket
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import DeviceMesh, PrefixStore, ProcessGroup, Store

from offbeat.backends import backends_of, open_group, timeout_of
from offbeat.heartbeat import Heartbeat, PeerLost
from offbeat.lane import Lane
from offbeat.meter import Meter

Axis = Literal["world", "node", "local"]
_groups: "weakref.WeakSet[Group]" = weakref.WeakSet()
_DROPPERS = 8  # threads: ending a group takes some 10 ms, nearly all of it waiting
Opener = Callable[[Store, int, int], ProcessGroup]  # where to meet, rank, size
RECONNECT = 60.0  # seconds that survivors of a loss have to connect anew


@dataclass(frozen=True, eq=False)
class Groups:
    """The layout of a world: ``nodes[i]`` lists the ranks on node i, which may be unequal.

    Give it to ``replicate(mesh=...)`` to describe nodes yourself. It opens no connection until
    then, and every replica opens its own. ``lost`` are ranks that a run has gone on without; the
    others keep their numbers.

    >>> groups = Groups(rank=2, nodes=((0, 1), (2,)), store=dist.HashStore(), opener=None)
    >>> groups.size, groups.local_rank, groups.slices, groups.members("node", 0)
    (3, 0, 1, (0, 2))
    """

    rank: int
    nodes: tuple[tuple[int, ...], ...]
    store: Store
    opener: Opener | None
    lost: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuse a layout in which somebody is missing or sits twice."""
        placed = sorted((*itertools.chain(*self.nodes), *self.lost))
        here = self.rank in placed and self.rank not in self.lost
        if placed != list(range(len(placed))) or not here or () in self.nodes:
            raise ValueError(
                f"nodes {self.nodes} do not place each rank, {self.rank} among them, exactly once; "
                "list every rank in one node, for example ((0, 1), (2,))"
            )

    @classmethod
    def of(cls, nodes: Sequence[Sequence[int]]) -> "Groups":
        """These nodes, in the running world of ``torch.distributed``."""
        _require_world()
        layout = tuple(tuple(node) for node in nodes)
        if sum(map(len, layout)) != dist.get_world_size():
            raise ValueError(
                f"nodes {layout} do not place {dist.get_world_size()} ranks; list every rank in "
                "one node, for example ((0, 1), (2,))"
            )
        world = dist.distributed_c10d._get_default_group()
        opener = partial(open_group, backends=backends_of(world), timeout=timeout_of(world))
        store = PrefixStore("offbeat", world.get_group_store())
        return cls(dist.get_rank(), layout, store, opener)

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh) -> "Groups":
        """A DeviceMesh with the axes ``("node", "local")``."""
        if mesh.mesh_dim_names != ("node", "local"):
            raise ValueError(
                f"the mesh has the axes {mesh.mesh_dim_names}, expected ('node', 'local'); make "
                "it with init_device_mesh(device, (nodes, ranks_per_node), "
                "mesh_dim_names=('node', 'local'))"
            )
        return cls.of(mesh.mesh.tolist())

    @classmethod
    def discover(cls) -> "Groups":
        """What the ranks say of themselves: one node for each host they name.

        The host is the launcher's ``GROUP_RANK`` where torchrun sets it and the host name
        elsewhere. One small all-gather through the store; all ranks must call.
        """
        _require_world()
        mine = os.environ.get("GROUP_RANK") or socket.gethostname()
        store = dist.distributed_c10d._get_default_group().get_group_store()
        # Counted per rank, not waited for: a second discovery must not read the first one's names.
        turn = store.add(f"offbeat/discoveries/{dist.get_rank()}", 1)
        here = PrefixStore(f"offbeat/discover/{turn}", store)
        here.set(str(dist.get_rank()), mine)
        hosts = here.multi_get([str(rank) for rank in range(dist.get_world_size())])
        nodes: dict[bytes, list[int]] = {}
        for rank, host in enumerate(hosts):
            nodes.setdefault(host, []).append(rank)
        return cls.of(list(nodes.values()))

    def among(self, living: Collection[int]) -> "Groups":
        """This layout without the ranks that are lost.

        >>> groups = Groups(rank=2, nodes=((0, 1), (2,)), store=dist.HashStore(), opener=None)
        >>> groups.among((1, 2)).nodes, groups.among((1, 2)).lost
        (((1,), (2,)), (0,))
        """
        kept = [tuple(rank for rank in node if rank in living) for node in self.nodes]
        lost = (*self.lost, *(rank for rank in self.ranks if rank not in living))
        return replace(self, nodes=tuple(node for node in kept if node), lost=lost)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of this world, ascending."""
        return tuple(sorted(itertools.chain(*self.nodes)))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @cached_property
    def node(self) -> int:
        """The number of this rank's node."""
        return next(i for i, node in enumerate(self.nodes) if self.rank in node)

    @property
    def local_rank(self) -> int:
        """This rank's place in its node."""
        return self.nodes[self.node].index(self.rank)

    @property
    def slices(self) -> int:
        """Into how many slices a model is cut between nodes: the smallest node's size."""
        return min(len(node) for node in self.nodes)

    def members(self, axis: Axis, local_rank: int) -> tuple[int, ...]:
        """The ranks that the rank at ``local_rank`` of this node meets on ``axis``."""
        if axis == "world":
            return self.ranks
        if axis == "local":
            return self.nodes[self.node]
        return tuple(node[local_rank] for node in self.nodes) if local_rank < self.slices else ()


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


@dataclass(eq=False)
class Links:
    """The process groups of one replica: opened on demand, guarded and closed together."""

    groups: Groups
    name: str
    heartbeat: Heartbeat
    meter: Meter
    opened: list[Group] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    @classmethod
    def connect(cls, groups: Groups) -> "Links":
        """Start a replica's heartbeat under a name that all its ranks derive alike."""
        # Ranks attach their replicas in the same order, so their counts agree.
        number = groups.store.add(f"attached/{groups.rank}", 1)
        store = PrefixStore(str(number), groups.store)
        return cls(groups, str(number), Heartbeat(store, groups.rank, groups.ranks), Meter())

    def among(self, living: Collection[int]) -> "Links":
        """New links between the living, whose counters go on; these are then to be closed."""
        groups = self.groups.among(living)
        name = f"{self.name} without {groups.lost}"
        heartbeat = Heartbeat(PrefixStore(name, groups.store), groups.rank, groups.ranks)
        heartbeat.phase = (self.heartbeat.phase[0], "")
        return Links(groups, name, heartbeat, self.meter)

    def open(self, axis: Axis) -> Group | None:
        """A new group over ``axis``; None where this rank would be alone in it or has no part."""
        number = next(self.numbers)  # counted even where this rank has no part: names must agree
        members = self.groups.members(axis, self.groups.local_rank)
        if len(members) < 2:
            return None
        assert self.groups.opener is not None, "a layout without an opener cannot connect"
        meet = PrefixStore(f"{self.name}/{axis}{number}/{members}", self.groups.store)
        place = members.index(self.groups.rank)
        opener = partial(_in_time, self.groups.opener) if self.groups.lost else self.groups.opener
        process_group = opener(meet, place, len(members))
        self.heartbeat.guard(process_group)
        group = Group(process_group, members, axis, self.heartbeat, self.meter)
        self.opened.append(group)
        return group

    def close(self) -> None:
        """End the heartbeat, the lanes and the groups."""
        self.heartbeat.stop()
        for group in self.opened:
            if "lane" in vars(group):
                group.lane.close()
            group.process_group.shutdown()
            group.closed = True
        self.opened.clear()


def drop(groups: Iterable[Group]) -> None:
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


def detached(process_groups: Collection[ProcessGroup]) -> list[Group]:
    """Those groups whose replica has been detached."""
    return [g for g in _groups if g.closed and g.process_group in process_groups]


@atexit.register
def _drop_all() -> None:
    """Let go of all process groups before Python ends.

    A thread of Gloo's that lets go of a tensor after Python has ended aborts the process.
    """
    drop(list(_groups))


def _empty(dropped: list[ProcessGroup]) -> None:
    with contextlib.suppress(IndexError):  # another thread had the last
        while dropped:
            dropped.pop()


def _in_time(opener: Opener, meet: Store, rank: int, size: int) -> ProcessGroup:
    """Open a group of survivors, who all come at once.

    If another rank dies now, the others would wait for it until the timeout of the process group,
    half an hour: so they do it in a thread, and leave it behind.
    """
    opened: list[ProcessGroup] = []
    lane = Lane("offbeat-reconnect", wake=lambda: None)
    try:
        lane.submit(lambda: opened.append(opener(meet, rank, size))).result(RECONNECT)
    except (TimeoutError, RuntimeError) as error:
        raise PeerLost(
            f"the survivors of a loss could not connect within {RECONNECT:.0f} s: another rank was "
            f"lost meanwhile ({error}); start again from the last checkpoint"
        ) from error
    finally:
        lane.close()
    return opened[0]


def _require_world() -> None:
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "no process group: torch.distributed is not initialized; call "
            "torch.distributed.init_process_group() first and start with torchrun"
        )
