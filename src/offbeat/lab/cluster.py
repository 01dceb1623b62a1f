"""The layout of a cluster: the ranks of each node, and their environment variables."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

MAX_NODES = 200  # each has an address in one /24


@dataclass(frozen=True)
class Cluster:
    """A layout with ``per_node[i]`` ranks on node i, numbered node by node as by torchrun.

    >>> cluster = Cluster.of(2, [2, 1])
    >>> cluster.size, cluster.node_of(2), cluster.local_rank(1)
    (3, 1, 1)
    """

    per_node: tuple[int, ...]

    @classmethod
    def of(cls, nodes: int, procs_per_node: int | Sequence[int] = 1) -> "Cluster":
        """Build a layout from the same number of ranks on every node, or one number per node.

        Raises ValueError for a number of nodes outside 1 to 200, or a node without ranks.
        """
        if not 1 <= nodes <= MAX_NODES:
            raise ValueError(f"nodes: got {nodes}, expected 1 to {MAX_NODES}; for example 4")
        if isinstance(procs_per_node, int):
            procs_per_node = [procs_per_node] * nodes
        per_node = tuple(procs_per_node)
        listed = ",".join(map(str, per_node))
        if len(per_node) != nodes:
            raise ValueError(
                f"processes per node: got {len(per_node)} numbers, {listed}, for {nodes} nodes; "
                "pass one number for all nodes, or one per node"
            )
        if min(per_node) < 1:
            raise ValueError(f"processes per node: got {listed}, expected at least 1 on every node")
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
        """The index of ``rank`` within its node."""
        return rank - self.leaders[self.node_of(rank)]

    def environment(self, rank: int) -> Mapping[str, str]:
        """Return the variables that torchrun sets and that differ between ranks."""
        node = self.node_of(rank)
        numbers = {
            "RANK": rank,
            "LOCAL_RANK": self.local_rank(rank),
            "WORLD_SIZE": self.size,
            "LOCAL_WORLD_SIZE": self.per_node[node],
            # All nodes share one host name; offbeat distinguishes nodes by this variable.
            "GROUP_RANK": node,
            "GROUP_WORLD_SIZE": self.nodes,
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": self.size,
        }
        return {name: str(number) for name, number in numbers.items()}
