"""The assignment of ranks to nodes: as given, from a DeviceMesh, or discovered."""

import itertools
import json
import os
import socket
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal, Protocol
from zlib import crc32

from torch.distributed import DeviceMesh, ProcessGroup, Store

from offbeat.liveness.heartbeats.diagnosis import store_lost
from offbeat.liveness.heartbeats.heartbeat import Heartbeat
from offbeat.liveness.heartbeats.roll_call import roll_call
from offbeat.liveness.store.client import TimedStore
from offbeat.platform.process_group import (
    GLOO,
    backends_of,
    default_group,
    default_store,
    open_group,
    timeout_of,
)
from offbeat.platform.tcp_store import connect_store
from offbeat.transport.run import token
from offbeat.transport.run.rendezvous import NODE, place_of_this_process

Axis = Literal["world", "node", "local"]
PREFIX = "offbeat"  # of all keys in the store


class Opener(Protocol):
    """Opens a process group."""

    def __call__(
        self, store: Store, rank: int, size: int, *, is_lazy: bool = False, connections: int = 1
    ) -> ProcessGroup:
        """Open a group of ``size`` members; connect them all, or ``is_lazy`` none of them yet.

        ``connections``: how many two members have.
        """


@dataclass(frozen=True, eq=False)
class World:
    """Describes the layout of the ranks on nodes, which may be of unequal size.

    Pass it as ``replicate(mesh=...)`` to describe the nodes yourself; :meth:`of`,
    :meth:`from_mesh` and :meth:`discover` make one for a running world. It opens no connection:
    every replica opens its own.

    Attributes:
        rank: this rank.
        nodes: the ranks of each node; ``nodes[i][j]`` is local rank j of node i.
        store: the rendezvous store.
        opener: opens a process group, given a store, a rank and a size; None for a layout that
            cannot connect.
        lost: ranks that a run continues without; the others keep their numbers.
        owner: the process group in which the ranks run already, if they do. Weak: a group that is
            held lives on after ``destroy_process_group()``, and its threads disturb the exit.
        is_new: whether this rank takes part in no start: it can only join a run.
        is_part: whether ranks of the process group, as of other pipeline stages, take no part.
        prefix: prefix of all keys in the store.
        store_returns: whether the store may be ended and started again at its address.
        connections: how many two ranks of different nodes have in each process group, as
            :func:`offbeat.replicate` sets it.

    >>> from torch.distributed import HashStore
    >>> world = World(rank=2, nodes=((0, 1), (2,)), store=HashStore(), opener=None)
    >>> world.size, world.local_rank, world.slices, world.members("node", 0)
    (3, 0, 1, (0, 2))
    """

    rank: int
    nodes: tuple[tuple[int, ...], ...]
    store: Store
    opener: Opener | None
    lost: tuple[int, ...] = ()
    owner: "weakref.ref[ProcessGroup] | None" = None
    is_new: bool = False
    is_part: bool = False
    prefix: str = PREFIX
    store_returns: bool = False
    connections: int = 1

    def __post_init__(self) -> None:
        """Raise ``ValueError`` unless each rank is on exactly one node."""
        placed = sorted((*itertools.chain(*self.nodes), *self.lost))
        here = self.rank in placed and self.rank not in self.lost
        every = sorted({*placed}) if self.is_part else list(range(len(placed)))
        if placed != every or not here or () in self.nodes:
            raise ValueError(
                f"nodes {self.nodes} do not place each rank, {self.rank} among them, exactly once; "
                "list every rank in one node, for example ((0, 1), (2,))"
            )

    @classmethod
    def of(cls, nodes: Sequence[Sequence[int]]) -> "World":
        """Describe ``nodes``, lists of ranks, in the running world of ``torch.distributed``.

        Raises ``ValueError`` if there is no process group, or if ``nodes`` does not contain
        every rank exactly once.
        """
        world = default_group()
        layout = tuple(tuple(node) for node in nodes)
        if sum(map(len, layout)) != world.size():
            raise ValueError(
                f"nodes {layout} do not place {world.size()} ranks; list every rank in "
                "one node, for example ((0, 1), (2,))"
            )
        opener = partial(open_group, backends=backends_of(world), timeout=timeout_of(world))
        return cls(world.rank(), layout, default_store(), opener, owner=weakref.ref(world))

    @classmethod
    def at(
        cls, store: str | Store, *, size: int, rank: int | None = None, ranks_per_node: int = 1
    ) -> "World":
        """Describe ranks that meet in a store outside of them all, without a process group.

        For runs that lost workers may join again: ``torch.distributed.init_process_group()``
        connects a fixed set of ranks, and its store often ends with one of them. Messages go over
        Gloo, those of GPUs through host memory.

        Args:
            store: the address ``"host:port"`` of a ``torch.distributed.TCPStore`` in a process
                that outlives all workers, or a store of torch.
            size: the number of ranks that start the run.
            rank: this rank, below ``size``, at the first start and after every restart; None for a
                new worker, which gets the next free number when it joins.
            ranks_per_node: how many ranks in a row are on one node. Those of a node are started
                again together; a new worker is a node of its own.

        The first process that comes to a store makes it that of a run with its ``OFFBEAT_TOKEN``,
        or of one without; those with another token get a ``ValueError``.

        Raises ``ValueError`` for a wrong address, size, rank, number of ranks per node or token.

        >>> from torch.distributed import HashStore
        >>> World.at(HashStore(), size=6, rank=2, ranks_per_node=2).nodes
        ((0, 1), (2, 3), (4, 5))
        """
        _require_whole(size=size, rank=rank or 0, ranks_per_node=ranks_per_node)
        if ranks_per_node < 1 or size % ranks_per_node or (rank is None and ranks_per_node > 1):
            raise ValueError(
                f"ranks_per_node={ranks_per_node} with size={size}, rank={rank}, expected a "
                "divisor of size, and a rank: only one that is a node of its own can be new"
            )
        if size < 1 or not 0 <= (rank or 0) < size:
            raise ValueError(
                f"rank={rank} of size={size}, expected a rank from 0 to size - 1, or None for a "
                "new worker, and the number of ranks that start the run as size"
            )
        place = connect_store(store) if isinstance(store, str) else store
        prefix = token.keys_of_run() + PREFIX
        timed = TimedStore(place).under(PREFIX)
        try:
            token.claim(timed, store if isinstance(store, str) else "the store")
        except RuntimeError as error:
            raise store_lost(error) from error
        finally:
            timed.close()
        count, each = size if rank is not None else size + 1, ranks_per_node
        nodes = tuple(tuple(range(first, first + each)) for first in range(0, count, each))
        opener = partial(open_group, backends=GLOO)
        number = size if rank is None else rank
        return cls(number, nodes, place, opener, is_new=rank is None, prefix=prefix)

    @classmethod
    def from_env(cls, *, elastic: bool = False) -> "World":
        """Describe the ranks that meet in the store at ``OFFBEAT_STORE``, without a process group.

        ``offbeat store`` numbers the first processes in the order in which they come; those of one
        ``OFFBEAT_NODE``, or of one host and launcher, are one node. :func:`offbeat.replicate` calls
        this where it is given no ``mesh``; call it before for the rank, and pass the result. A
        process has one place: later calls return the same.

        Args:
            elastic: whether this process may join a run that goes on, as a new rank
                (:attr:`is_new`), by ``replicate(elastic=True)``. Otherwise it waits for its end,
                and starts the next run together with others.

        Raises ``ValueError`` if the variable is missing or malformed, nobody answers there, or the
        store is for another run, by its name or ``OFFBEAT_TOKEN``, or for fewer ranks than the
        launcher has started.
        """
        place, store = place_of_this_process(elastic)
        opener = partial(open_group, backends=GLOO)
        is_new, nodes = place.rank is None, place.nodes
        number = sum(map(len, nodes)) if place.rank is None else place.rank
        nodes = (*nodes, (number,)) if is_new else nodes
        prefix = f"{token.keys_of_run()}run{place.run}/{PREFIX}"
        return cls(number, nodes, store, opener, is_new=is_new, prefix=prefix, store_returns=True)

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh) -> "World":
        """Take the nodes from a DeviceMesh with the axes ``("node", "local")``.

        Or several after ``"node"``, over all of which the ranks of a node are numbered. The other
        ranks take no part if it is a part of a mesh, as ``mesh["node", "local"]`` with a pipeline
        axis beside.
        """
        names = mesh.mesh_dim_names or ()
        if names[:1] != ("node",):
            raise ValueError(
                f"the mesh has the axes {mesh.mesh_dim_names}, expected ('node', 'local'); make "
                "it with init_device_mesh(device, (nodes, ranks_per_node), "
                "mesh_dim_names=('node', 'local')), or with other axes after 'node'"
            )
        ranks = mesh.mesh.view(len(mesh.mesh), -1)
        world = cls.of([range(default_group().size())])
        nodes = tuple(tuple(node) for node in ranks.tolist())
        if ranks.numel() == world.size:
            return replace(world, nodes=nodes)
        prefix = f"{PREFIX}/ranks {crc32(str(nodes).encode())}"  # parts attach by themselves
        return replace(world, nodes=nodes, is_part=True, prefix=prefix)

    @classmethod
    def discover(cls) -> "World":
        """Group the ranks by ``OFFBEAT_NODE``, else ``GROUP_RANK`` of torchrun, else host names.

        One small gather through the store; all ranks must call. Raises ``ValueError`` if there
        is no process group, and :class:`PeerLost` if a rank does not come.
        """
        world = default_group()
        store, ranks = TimedStore(default_store()).under(PREFIX), tuple(range(world.size()))
        # Counted by each rank for itself: a second discovery must not read the first one's names.
        here = store.under(f"discover/{store.add(f'discoveries/{world.rank()}', 1)}")
        heartbeat = Heartbeat(here, world.rank(), ranks)
        try:
            hosts = roll_call(host_name(), json.dumps, heartbeat, here, world)
            return cls.on_hosts(json.loads(hosts))
        finally:
            heartbeat.stop()
            store.close()

    @classmethod
    def on_hosts(cls, hosts: Sequence[str]) -> "World":
        """Describe the running world, whose rank i is on ``hosts[i]``."""
        nodes: dict[str, list[int]] = {}
        for rank, host in enumerate(hosts):
            nodes.setdefault(host, []).append(rank)
        return cls.of(list(nodes.values()))

    def among(self, living: Collection[int]) -> "World":
        """Return this layout with the ranks ``living`` alone, the others marked as lost.

        >>> from torch.distributed import HashStore
        >>> world = World(rank=2, nodes=((0, 1), (2,)), store=HashStore(), opener=None)
        >>> world.among((1, 2)).nodes, world.among((1, 2)).lost
        (((1,), (2,)), (0,))
        """
        kept = [tuple(rank for rank in node if rank in living) for node in self.nodes]
        lost = (*self.lost, *(rank for rank in self.ranks if rank not in living))
        return replace(self, nodes=tuple(node for node in kept if node), lost=lost)

    def joined_by(self, rank: int, count: int = 1) -> "World":
        """Return this layout with ``rank`` too, the first of ``count`` on a node of their own.

        >>> from torch.distributed import HashStore
        >>> world = World(rank=2, nodes=((0,), (2,)), store=HashStore(), opener=None, lost=(1,))
        >>> world.joined_by(1).nodes, world.joined_by(1).lost, world.joined_by(3).ranks
        (((0,), (1,), (2,)), (), (0, 2, 3))
        """
        node = tuple(range(rank, rank + count))
        lost = tuple(other for other in self.lost if other not in node)
        return replace(self, nodes=tuple(sorted((*self.nodes, node))), lost=lost)

    def between_nodes(self) -> "World":
        """Return the layout in which each node is one rank: for the first rank of every node.

        >>> from torch.distributed import HashStore
        >>> world = World(rank=2, nodes=((0, 1), (2, 3)), store=HashStore(), opener=None)
        >>> world.between_nodes().rank, world.between_nodes().nodes
        (1, ((0,), (1,)))
        """
        nodes = tuple((number,) for number in range(len(self.nodes)))
        return replace(self, rank=self.node, nodes=nodes, lost=(), owner=None)

    def timed_store(self) -> TimedStore:
        """Return a new user of this process's client of the store."""
        return TimedStore(self.store, returns=self.store_returns).under(self.prefix)

    @property
    def group(self) -> ProcessGroup | None:
        """The process group of :attr:`owner`, if there is one that has not ended.

        Its timeout limits the start-up, and its connections tell of ranks that end before.
        """
        return None if self.owner is None else self.owner()

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that are not lost, ascending."""
        return tuple(sorted(itertools.chain(*self.nodes)))

    @property
    def counterparts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks with equal local ranks, one of each node; of equal nodes."""
        return tuple(zip(*self.nodes, strict=True))

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
        """The number of this rank in its node, from 0."""
        return self.nodes[self.node].index(self.rank)

    @property
    def slices(self) -> int:
        """The number of slices in which nodes exchange a model: the size of the smallest node."""
        return min(len(node) for node in self.nodes)

    def members(self, axis: Axis, local_rank: int) -> tuple[int, ...]:
        """Return the group of the rank at ``local_rank`` of this node on ``axis``, or ()."""
        if axis == "world":
            return self.ranks
        if axis == "local":
            return self.nodes[self.node]
        return tuple(node[local_rank] for node in self.nodes) if local_rank < self.slices else ()


def host_name() -> str:
    """Return the name of this rank's node: ``OFFBEAT_NODE``, that of torchrun, or of the host."""
    return os.environ.get(NODE) or os.environ.get("GROUP_RANK") or socket.gethostname()


def _require_whole(**numbers: object) -> None:
    for name, number in numbers.items():
        if not isinstance(number, int):
            raise ValueError(f"{name}={number!r}, expected a whole number")
