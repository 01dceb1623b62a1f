"""Which rank sits on which node, and what the environment tells it about that."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

MOST_NODES = 200  # each has an address in one /24


@dataclass(frozen=True)
class Cluster:
    """``per_node[i]`` ranks on node i, numbered node by node as torchrun does.

    >>> world = Cluster.of(2, [2, 1])
    >>> world.size, world.node_of(2), world.local_rank(1)
    (3, 1, 1)
    """

    per_node: tuple[int, ...]

    @classmethod
    def of(cls, nodes: int, procs_per_node: int | Sequence[int] = 1) -> "Cluster":
        """The same number of ranks on every node, or one number for each."""
        if not 1 <= nodes <= MOST_NODES:
            raise ValueError(f"nodes: got {nodes}, expected 1 to {MOST_NODES}; for example 4")
        if isinstance(procs_per_node, int):
            procs_per_node = [procs_per_node] * nodes
        per_node = tuple(procs_per_node)
        if len(per_node) != nodes:
            raise ValueError(
                f"processes per node: got {len(per_node)} numbers, {_listed(per_node)}, for "
                f"{nodes} nodes; give one number for all nodes, or one for each"
            )
        if min(per_node) < 1:
            raise ValueError(
                f"processes per node: got {_listed(per_node)}; every node runs at least 1"
            )
        return cls(per_node)

    @cached_property
    def _nodes(self) -> tuple[int, ...]:
        return tuple(node for node, count in enumerate(self.per_node) for _ in range(count))

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return len(self.per_node)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self._nodes)

    @cached_property
    def leaders(self) -> tuple[int, ...]:
        """The first rank of each node."""
        return tuple(itertools.accumulate(self.per_node, initial=0))[:-1]

    def node_of(self, rank: int) -> int:
        """The node that ``rank`` runs on."""
        return self._nodes[rank]

    def local_rank(self, rank: int) -> int:
        """The place of ``rank`` in its node."""
        return rank - self.leaders[self.node_of(rank)]

    def environment(self, rank: int) -> Mapping[str, str]:
        """The variables that torchrun would set and that depend on the rank's place."""
        node = self.node_of(rank)
        numbers = {
            "RANK": rank,
            "LOCAL_RANK": self.local_rank(rank),
            "WORLD_SIZE": self.size,
            "LOCAL_WORLD_SIZE": self.per_node[node],
            # All nodes share one host name: this is how offbeat tells them apart.
            "GROUP_RANK": node,
            "GROUP_WORLD_SIZE": self.nodes,
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": self.size,
        }
        return {name: str(number) for name, number in numbers.items()}


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))
