"""Gradients rounded to 8 bits with error feedback (Karimireddy et al. 2019, Algorithm 2)."""

import numpy as np

from reference.participants import Array, Gradient, Nodes, per_rank, start_rows
from reference.sgd import SGD


def int8(
    start: Array,
    gradient: Gradient,
    *,
    nodes: Nodes,
    steps: int,
    lr: float,
    momentum: float = 0.0,
) -> Array:
    """v = SGD(v, (1/P) sum_p C(e_p + g_p)), e_p = e_p + g_p - C(e_p + g_p).

    C(x) = s round(x / s) with s = max |x| / 127. Returns v, (steps+1, ranks, d).
    """
    world: Nodes = tuple((rank,) for rank in range(sum(map(len, nodes))))
    optimizer = SGD(lr, momentum)
    v = start_rows(start, world)
    residual, velocity = np.zeros_like(v), np.zeros_like(v)
    history = [v]
    for k in range(steps):
        acc = residual + np.stack([gradient(rank, row, k) for rank, row in enumerate(v)])
        scale = np.abs(acc).max(axis=1, keepdims=True) / 127
        sent = scale * np.round(acc / scale)
        residual = acc - sent
        v, velocity = optimizer.step(v, np.broadcast_to(sent.mean(axis=0), v.shape), velocity)
        history.append(v)
    return per_rank(history, world)
