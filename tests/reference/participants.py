"""Who takes part in an exchange: every rank by itself, or every node as one.

The ranks of one participant always hold the same model, so a method keeps one row per participant.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Gradient = Callable[[int, Array, int], Array]  # (rank, z of that rank, k) -> gradient, shape (d,)
Nodes = tuple[tuple[int, ...], ...]  # global ranks node by node: a partition of range(ranks)


def participants(nodes: Nodes, within_local: bool) -> Nodes:
    """Ranks of each participant: the nodes themselves, or {r} for every rank r."""
    return nodes if within_local else tuple((rank,) for rank in sorted(sum(nodes, ())))


def start_rows(start: Array, groups: Nodes) -> Array:
    """z_0 of each participant; start is one model for all, (d,), or one per rank, (ranks, d)."""
    ranks = sum(len(group) for group in groups)
    per_rank = np.broadcast_to(start, (ranks, start.shape[-1])).astype(np.float64)
    return per_rank[[group[0] for group in groups]]


def mean_gradients(gradient: Gradient, groups: Nodes, z: Array, k: int) -> Array:
    """g_p = (1/|p|) sum over the ranks r of participant p of gradient(r, z_p, k)."""
    rows = [
        np.mean([gradient(rank, z_p, k) for rank in group], axis=0)
        for z_p, group in zip(z, groups, strict=True)
    ]
    return np.stack(rows)


def per_rank(history: list[Array], groups: Nodes) -> Array:
    """Rows of participants, (time, participants, ...), as rows of ranks, (time, ranks, ...)."""
    owner = {rank: row for row, group in enumerate(groups) for rank in group}
    return np.stack(history)[:, [owner[rank] for rank in range(len(owner))]]
