"""Adasum of many vectors and of updates (Maleki et al. 2021), weighted for any world size."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from reference.participants import (
    Array,
    Gradient,
    Nodes,
    mean_gradients,
    participants,
    per_rank,
    start_rows,
)
from reference.sgd import SGD


def pairwise(a: Array, b: Array, na: int = 1, nb: int = 1) -> Array:
    """(1 - na/N a.b/|a|^2) a + (1 - nb/N a.b/|b|^2) b; the other one where one is zero."""
    aa, bb, ab = float(a @ a), float(b @ b), float(a @ b)
    if aa == 0:
        return b
    if bb == 0:
        return a
    total = na + nb
    result: Array = (1 - na / total * ab / aa) * a + (1 - nb / total * ab / bb) * b
    return result


def combine(vectors: Iterable[Array]) -> Array:
    """Eq. 9: neighbours first; the last of an odd level goes up as it is."""
    level = [(np.asarray(v, dtype=np.float64), 1) for v in vectors]
    while len(level) > 1:
        above = []
        for i in range(0, len(level) - 1, 2):
            (a, na), (b, nb) = level[i], level[i + 1]
            above.append((pairwise(a, b, na, nb), na + nb))
        level = above + ([level[-1]] if len(level) % 2 else [])
    return level[0][0]


def combine_layers(rows: Array, sizes: Sequence[int]) -> Array:
    """Layer by layer: columns of rows, (ranks, d), in runs of the given sizes."""
    ends = np.cumsum(sizes)
    return np.concatenate(
        [combine(rows[:, end - n : end]) for n, end in zip(sizes, ends, strict=True)]
    )


def bf16(x: Array) -> Array:
    """The nearest numbers with 8 significant bits; of two the even one, float32 in between."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
    return nearest.astype(np.uint32).view(np.float32).astype(np.float64)


def adasum(
    start: Array,
    gradient: Gradient,
    *,
    layers: Sequence[int],
    nodes: Nodes,
    steps: int,
    lr: float,
    momentum: float = 0.0,
    every: int = 1,
    within_local: bool = False,
    rounded: Callable[[Array], Array] = lambda x: x,
) -> Array:
    """z_i = SGD(z_i), then z = a + AS(z_i - a), a = z where (k+1) mod every = 0.

    Updates are rounded when they leave and AS is rounded when it is handed out; each time what
    is lost is added the next time.
    """
    groups = participants(nodes, within_local)
    optimizer = SGD(lr, momentum)
    z = start_rows(start, groups)
    anchor, velocity = z[0], np.zeros_like(z)
    owed, owed_back = np.zeros_like(z), np.zeros_like(z[0])
    history = [z]
    for k in range(steps):
        z, velocity = optimizer.step(z, mean_gradients(gradient, groups, z, k), velocity)
        if (k + 1) % every == 0:
            updates = z - anchor + owed
            owed = updates - rounded(updates)
            combined = combine_layers(rounded(updates), layers) + owed_back
            owed_back = combined - rounded(combined)
            anchor = anchor + rounded(combined)
            z = np.tile(anchor, (len(z), 1))
        history.append(z)
    return per_rank(history, groups)
