"""Local SGD: own steps, and every so often the mean of the parameters."""

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


def local_sgd(
    start: Array,
    gradient: Gradient,
    *,
    nodes: Nodes,
    steps: int,
    every: int,
    lr: float,
    momentum: float = 0.0,
    within_local: bool = False,
) -> Array:
    """z_i = SGD(z_i), then z_i = (1/n) sum_j z_j where (k+1) mod every = 0; (steps+1, ranks, d).

    The velocities stay local. A node that takes part as one counts once, whatever its size.
    """
    groups = participants(nodes, within_local)
    optimizer = SGD(lr, momentum)
    z = start_rows(start, groups)
    velocity = np.zeros_like(z)
    history = [z]
    for k in range(steps):
        z, velocity = optimizer.step(z, mean_gradients(gradient, groups, z, k), velocity)
        if (k + 1) % every == 0:
            z = np.tile(z.mean(axis=0), (len(z), 1))
        history.append(z)
    return per_rank(history, groups)
