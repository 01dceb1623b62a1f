"""Which rank sits on which node: given, from a DeviceMesh, or discovered."""

import itertools
import os
import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal

import torch.distributed as dist
from torch.distributed import DeviceMesh, PrefixStore, ProcessGroup, Store

from offbeat.comm.process_group import backends_of, open_group, timeout_of

Axis = Literal["world", "node", "local"]
Opener = Callable[[Store, int, int], ProcessGroup]  # where to meet, rank, size


@dataclass(frozen=True, eq=False)
class World:
    """The layout of a world: ``nodes[i]`` lists the ranks on node i, which may be unequal.

    Give it to ``replicate(mesh=...)`` to describe nodes yourself. It opens no connection until
    then, and every replica opens its own. ``lost`` are ranks that a run has gone on without; the
    others keep their numbers.

    >>> world = World(rank=2, nodes=((0, 1), (2,)), store=dist.HashStore(), opener=None)
    >>> world.size, world.local_rank, world.slices, world.members("node", 0)
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
    def of(cls, nodes: Sequence[Sequence[int]]) -> "World":
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
    def from_mesh(cls, mesh: DeviceMesh) -> "World":
        """A DeviceMesh with the axes ``("node", "local")``."""
        if mesh.mesh_dim_names != ("node", "local"):
            raise ValueError(
                f"the mesh has the axes {mesh.mesh_dim_names}, expected ('node', 'local'); make "
                "it with init_device_mesh(device, (nodes, ranks_per_node), "
                "mesh_dim_names=('node', 'local'))"
            )
        return cls.of(mesh.mesh.tolist())

    @classmethod
    def discover(cls) -> "World":
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

    def among(self, living: Collection[int]) -> "World":
        """This layout without the ranks that are lost.

        >>> world = World(rank=2, nodes=((0, 1), (2,)), store=dist.HashStore(), opener=None)
        >>> world.among((1, 2)).nodes, world.among((1, 2)).lost
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


def _require_world() -> None:
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "no process group: torch.distributed is not initialized; call "
            "torch.distributed.init_process_group() first and start with torchrun"
        )
