"""Topologies by name, as recipes accept them."""

from typing import Any

from offbeat.topology.digraph import Digraph
from offbeat.topology.families import BipartiteExponential, Complete, Exponential, Ring
from offbeat.topology.graph import Topology
from offbeat.topology.phases import Phases


def as_topology(topology: Any, peers: int = 1) -> Topology:
    """Return the topology that a name, a graph or a list of phases stands for.

    ``topology`` is "exponential" (with ``peers`` receivers), "ring", "bipartite", "complete", a
    :class:`Topology`, a networkx graph, a function of the number of participants that makes one,
    or phases of these. Raises ``ValueError`` for anything else.

    >>> as_topology("ring"), as_topology([(9, "complete"), (None, "ring")])
    (Ring(), Phases(phases=((9, Complete()), (None, Ring()))))
    """
    named: dict[str, Topology] = {
        "exponential": Exponential(peers),
        "ring": Ring(),
        "bipartite": BipartiteExponential(),
        "complete": Complete(),
    }
    if peers != 1 and topology != "exponential":
        raise ValueError(
            f"peers={peers} with topology={topology!r}: only topology='exponential' takes a "
            "number of peers; leave peers=1"
        )
    if isinstance(topology, Topology):
        return topology
    if isinstance(topology, str) and topology in named:
        return named[topology]
    if isinstance(topology, list | tuple) and all(isinstance(p, list | tuple) for p in topology):
        return Phases(tuple((count, as_topology(graph, peers=1)) for count, graph in topology))
    makes_graphs = callable(topology) and not isinstance(topology, type)
    if makes_graphs or hasattr(topology, "is_directed"):
        return Digraph(topology)
    raise ValueError(
        f"topology={topology!r}, expected one of {', '.join(map(repr, named))}, a Topology, a "
        "networkx graph or a function that makes one, or phases: [(9, 'complete'), (None, 'ring')]"
    )
