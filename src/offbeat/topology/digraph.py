"""networkx graphs as topologies."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from offbeat.topology.graph import Peers, Topology


@final
@dataclass(frozen=True, repr=False)
class Digraph(Topology):
    """Makes a topology of a networkx graph, a list of them, or a function that returns either.

    The nodes of a graph are the participants 0 to n-1. An undirected edge counts in both
    directions. A participant splits its mass equally between itself and its successors. Exchange
    number i uses graph i modulo the length of the list. A function is called with n, as networkx's
    own generators are.

    Raises ``ValueError`` in :meth:`peers` if ``source`` is no graph, or its nodes are not 0 to n-1.

    >>> import networkx
    >>> Digraph(networkx.star_graph).peers(0, 4, index=0).send  # star_graph(n) has n + 1 nodes
    Traceback (most recent call last):
    ValueError: Digraph(star_graph): a graph of 5 nodes for 4 participants; nodes must be 0 to 3
    >>> Digraph(networkx.cycle_graph).peers(0, 4, index=0).receive
    (1, 3)
    """

    source: Any

    def __repr__(self) -> str:
        if callable(self.source):
            return f"Digraph({getattr(self.source, '__qualname__', type(self.source).__name__)})"
        sizes = [f"{graph.number_of_nodes()} nodes" for graph in self._graphs(0)]
        return f"Digraph({', '.join(sizes)})"

    def peers(self, rank: int, size: int, index: int) -> Peers:
        """Return equal shares for the successors of ``rank`` and itself."""
        graphs = self._graphs(size)
        graph = graphs[index % len(graphs)]
        if set(graph.nodes) != set(range(size)):
            raise ValueError(
                f"{self}: a graph of {graph.number_of_nodes()} nodes for {size} participants; "
                f"nodes must be 0 to {size - 1}"
            )
        out = tuple(graph.neighbors(rank))
        into = tuple(graph.predecessors(rank)) if graph.is_directed() else out
        share = 1 / (len(out) + 1)
        return Peers(tuple((to, share) for to in out), into, share)

    def period(self, size: int) -> int:
        """Return the number of graphs."""
        return len(self._graphs(size))

    def _graphs(self, size: int) -> Sequence[Any]:
        made = self.source(size) if callable(self.source) else self.source
        graphs = list(made) if isinstance(made, list | tuple) else [made]
        if not graphs or not all(hasattr(graph, "is_directed") for graph in graphs):
            raise ValueError(
                f"source={made!r}, expected a networkx graph, a list of them, or a function of the "
                "number of participants that returns one"
            )
        return graphs
