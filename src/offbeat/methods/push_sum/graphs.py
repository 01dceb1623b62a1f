"""The graphs of push-sum in a group: valid at its size, and the same on all ranks."""

import hashlib

import numpy as np

from offbeat.exchange import Site
from offbeat.kit.warning import warn
from offbeat.topology.graph import Topology, edges_of_periods, smallest_weight, validate
from offbeat.transport.small_gathers import gather_bytes

SMALL = 0.2  # a weight below which a step of the optimizer counts more than five times


def require_shrinking(topology: Topology, size: int) -> None:
    """Check the graph for one participant fewer at the start, not when a rank is lost."""
    try:
        if size > 2:
            validate(topology, size - 1)
    except ValueError as fault:
        raise ValueError(
            "elastic=True needs a graph that holds without one participant too; use "
            f"'exponential' or 'ring', or elastic=False: {fault}"
        ) from fault


def warn_of_small_weights(topology: Topology, site: Site, overlap: int) -> None:
    """Warn, on the first rank, if a weight makes a participant's optimizer steps far longer."""
    weight = smallest_weight(topology, site.size, overlap)
    if weight < SMALL and site.world.rank == site.world.ranks[0]:
        warn(
            f"on {topology} weights come down to {weight:.2g}, and a step of the optimizer moves a "
            f"model 1/w = {1 / weight:.3g} times as far there: a learning rate that is stable on a "
            "ring may diverge; use weighted_updates=True, or a graph in which all receive as much "
            "as they send"
        )


def agree_on_graphs(topology: Topology, site: Site) -> None:
    """Raise the same ValueError on all ranks if they built different graphs.

    A gather, only where functions of the user's build them.
    """
    if site.control is None or all(part.is_fixed for part in topology.parts()):
        return
    graphs = edges_of_periods(topology, site.size)
    digest = hashlib.sha256(np.concatenate([np.stack(g) for g in graphs], 1).tobytes()).digest()
    others = gather_bytes(digest, site.control)
    if any(other != digest for other in others):
        ranks = [rank for rank, o in zip(site.control.ranks, others, strict=True) if o != others[0]]
        raise ValueError(
            f"{topology} makes other graphs on the ranks {ranks} than on {site.control.ranks[0]}; "
            "all ranks must build the same graphs: seed random generators"
        )
