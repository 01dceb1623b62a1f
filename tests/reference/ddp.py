"""The baseline: SGD on the mean of all ranks' gradients."""

import numpy as np

from reference.participants import Array, Gradient, Nodes, mean_gradients, per_rank, start_rows
from reference.sgd import SGD


def ddp(
    start: Array,
    gradient: Gradient,
    *,
    nodes: Nodes,
    steps: int,
    lr: float,
    momentum: float = 0.0,
) -> Array:
    """z = SGD(z, (1/n) sum_r gradient(r, z, k)) over all n ranks alike; (steps+1, ranks, d)."""
    world: Nodes = (sum(nodes, ()),)
    optimizer = SGD(lr, momentum)
    z = start_rows(start, world)
    velocity = np.zeros_like(z)
    history = [z]
    for k in range(steps):
        z, velocity = optimizer.step(z, mean_gradients(gradient, world, z, k), velocity)
        history.append(z)
    return per_rank(history, world)
