"""Push-sum averaging and Stochastic Gradient Push (Assran et al. 2019).

P is column-stochastic: P[i, j] is the share of j's mass that goes to i.
"""

from collections.abc import Callable

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

Matrix = Callable[[int, int], Array]  # (size, index = number of earlier sends) -> P


def uniform_shares(size: int, peers: Callable[[int], set[int]]) -> Array:
    """P[i, j] = 1 / |{j} + peers(j)| for i = j and every peer i of j, else 0."""
    matrix = np.zeros((size, size))
    for j in range(size):
        targets = sorted({j} | peers(j))
        matrix[targets, j] = 1 / len(targets)
    return matrix


def one_peer_exponential(size: int, index: int) -> Array:
    """Rank j keeps 1/2 and sends 1/2 to j + 2^(index mod ceil(log2 n)) mod n."""
    period = (size - 1).bit_length()  # ceil(log2 n) in integers
    hop = 2 ** (index % period) if period else 0  # one rank alone keeps all
    return uniform_shares(size, lambda j: {(j + hop) % size})


def ring(size: int, index: int) -> Array:
    """Rank j keeps as much as it sends to each of j-1 and j+1 mod n, the same at every index."""
    return uniform_shares(size, lambda j: {(j - 1) % size, (j + 1) % size})


def exponential(size: int, index: int, peers: int) -> Array:
    """Rank j gives equal shares to itself and to j + 2^m for the next `peers` exponents m."""
    period = (size - 1).bit_length()
    exponents = [(index * peers + turn) % period for turn in range(peers)]
    return uniform_shares(size, lambda j: {(j + 2**m) % size for m in exponents})


def bipartite_exponential(size: int, index: int) -> Array:
    """Even j and odd i = j + d average, for d = 1, 3, 5, 9, 17, ... below n in turn."""
    distances = [d for d in (1, *(2**m + 1 for m in range(1, size))) if d < size]
    d = distances[index % len(distances)]
    return uniform_shares(size, lambda j: {(j + (d if j % 2 == 0 else -d)) % size})


def complete(size: int, index: int) -> Array:
    """Every entry is 1/n."""
    return np.full((size, size), 1 / size)


def irregular(size: int, index: int) -> Array:
    """Ring j -> j+1 with the chord 0 -> 2: from n = 3 on rows do not sum to 1, so w != 1."""
    return uniform_shares(size, lambda j: {(j + 1) % size} | ({2 % size} if j == 0 else set()))


def mix(matrix: Array, x: Array, w: Array) -> tuple[Array, Array]:
    """One round: x_i = sum_j P[i, j] x_j and w_i = sum_j P[i, j] w_j."""
    return matrix @ x, matrix @ w


def sgp(
    start: Array,
    gradient: Gradient,
    *,
    matrix: Matrix,
    nodes: Nodes,
    steps: int,
    lr: float,
    momentum: float = 0.0,
    within_local: bool = False,
    overlap: int = 0,
    every: int = 1,
    biased: bool = False,
    weighted: bool = False,
    drained: bool = False,
) -> tuple[Array, Array]:
    """x = w z + (SGD(z) - z);  x, w = P x, P w;  z = x / w, sending at every step k.

    With `overlap` = tau it sends when tau divides k, the graph's index being k / tau. What is off
    P's diagonal arrives at step k + tau. `every`, without overlap: it sends after each such step.
    `biased`: z = x; `weighted`: x = w SGD(z). `drained`: what is in flight at the end arrives in
    the last step. Returns z, (steps+1, ranks, d), and w, (steps+1, ranks); ranks of one node repeat
    its w.
    """
    groups = participants(nodes, within_local)
    optimizer = SGD(lr, momentum)
    anchor = start_rows(start, groups)
    w, velocity = np.ones(len(groups)), np.zeros_like(anchor)
    models, weights = [anchor], [w]
    arrivals: dict[int, tuple[Array, Array]] = {}
    for k in range(steps):
        gradients = mean_gradients(gradient, groups, anchor, k)
        after, velocity = optimizer.step(anchor, gradients, velocity)
        x = after if biased else w[:, None] * anchor + (after - anchor)
        x = w[:, None] * after if weighted else x
        if (k % overlap == 0) if overlap else ((k + 1) % every == 0):
            p = matrix(len(groups), k // max(every, overlap))
            away = p - np.diag(np.diag(p))
            arrivals[k + overlap] = mix(away, x, w)
            x, w = mix(p - away, x, w)
            arrived_x, arrived_w = arrivals.pop(k, (np.zeros_like(x), np.zeros_like(w)))
            x, w = x + arrived_x, w + arrived_w
        anchor = x if biased else x / w[:, None]
        models.append(anchor)
        weights.append(w)
    if drained:
        x = anchor if biased else w[:, None] * anchor
        x = x + sum(arrived for arrived, _ in arrivals.values())
        weights[-1] = w + sum(arrived for _, arrived in arrivals.values())
        models[-1] = x / weights[-1][:, None]
    return per_rank(models, groups), per_rank(weights, groups)
