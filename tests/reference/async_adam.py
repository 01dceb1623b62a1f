"""Asynchronous Adam in numpy, workers in turns, written from Renda's Algorithms 1 and 2."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


def async_adam(
    start: Vector,
    gradients: Sequence[tuple[int, int, Vector]],
    *,
    workers: int,
    private: bool,
    alpha: float = 0.001,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    by_coordinate: bool = False,
) -> tuple[Vector, Vector, Vector]:
    """Apply (worker, t, gradient) one after the other; theta, and m and v by worker.

    ``by_coordinate``: t is the number of updates of the coordinate, not the given one.
    """
    theta = start.copy()
    m = np.zeros((workers if private else 1, len(start)))
    v = np.zeros_like(m)
    updates = np.zeros(m.shape, int)
    b1, b2 = betas
    for worker, t, g in gradients:
        own = worker if private else 0
        for j in np.flatnonzero(g):
            updates[own, j] += 1
            time = updates[own, j] if by_coordinate else t
            step = alpha * np.sqrt(1 - b2**time) / (1 - b1**time)
            m[own, j] = b1 * m[own, j] + (1 - b1) * g[j]
            v[own, j] = b2 * v[own, j] + (1 - b2) * g[j] ** 2
            theta[j] -= alpha * weight_decay * theta[j]
            theta[j] -= step * m[own, j] / (np.sqrt(v[own, j]) + eps)
    return theta, m, v
