"""Communication graphs of gossip: which participant sends to which in every exchange."""

from offbeat.topology.by_name import as_topology
from offbeat.topology.digraph import Digraph
from offbeat.topology.families import BipartiteExponential, Complete, Exponential, Ring
from offbeat.topology.graph import (
    Peers,
    Topology,
    keeps_weights,
    mixing_matrix,
    smallest_weight,
    validate,
)
from offbeat.topology.phases import Phases, Symmetric

__all__ = [
    "BipartiteExponential",
    "Complete",
    "Digraph",
    "Exponential",
    "Peers",
    "Phases",
    "Ring",
    "Symmetric",
    "Topology",
    "as_topology",
    "keeps_weights",
    "mixing_matrix",
    "smallest_weight",
    "validate",
]
