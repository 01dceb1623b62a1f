"""SlowMo (Wang et al. 2020, Algorithm 1) on push-sum, one row per participant."""

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
from reference.push_sum import Matrix, mix
from reference.sgd import SGD


def slow_momentum(
    start: Array,
    gradient: Gradient,
    *,
    matrix: Matrix,
    nodes: Nodes,
    steps: int,
    every: int,
    lr: float,
    momentum: float = 0.0,
    alpha: float = 1.0,
    beta: float = 0.0,
    overlap: int = 0,
    within_local: bool = False,
) -> Array:
    """z_i by SGP; every tau steps x_0 - alpha gamma u, with u = beta u + (x_0 - x_tau) / gamma.

    x_0 is the model of the last such step, x_tau = sum x / sum w over all participants and all
    messages on their way, and gamma = lr. Then z = x_0 everywhere, w = 1, and no message is on its
    way; the velocities of SGD stay. Messages wait in `mail` as (step of arrival, x, w);
    (steps+1, ranks, d).
    """
    groups = participants(nodes, within_local)
    optimizer = SGD(lr, momentum)
    z = start_rows(start, groups)
    n = len(z)
    w, velocity = np.ones(n), np.zeros_like(z)
    x_0, u = z[0].copy(), np.zeros_like(z[0])
    mail: list[tuple[int, Array, Array]] = []
    history = [z]
    for k in range(steps):
        after, velocity = optimizer.step(z, mean_gradients(gradient, groups, z, k), velocity)
        x = w[:, None] * z + (after - z)
        if k % max(overlap, 1) == 0:
            p = matrix(n, k // max(overlap, 1))
            mail.append((k + overlap, *mix(p * (1 - np.eye(n)), x, w)))
            x, w = mix(p * np.eye(n), x, w)
        for _, x_more, w_more in (message for message in mail if message[0] == k):
            x, w = x + x_more, w + w_more
        mail = [message for message in mail if message[0] > k]
        z = x / w[:, None]
        if (k + 1) % every == 0:
            on_their_way = sum(message[1].sum(axis=0) for message in mail)
            weights = w.sum() + sum(message[2].sum() for message in mail)
            u = beta * u + (x_0 - (x.sum(axis=0) + on_their_way) / weights) / lr
            x_0 = x_0 - alpha * lr * u
            z, w, mail = np.tile(x_0, (n, 1)), np.ones(n), []
        history.append(z)
    return per_rank(history, groups)
