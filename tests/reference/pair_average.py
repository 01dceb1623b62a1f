"""Pair averaging where the order of events is known: one participant moves at a time."""

from collections.abc import Iterable

import numpy as np

from reference.participants import Array, Gradient

Event = tuple[str, int, int]  # ("step", i, k) or ("meet", i, j)


def replay(
    start: Array, gradient: Gradient, events: Iterable[Event], lr: float
) -> tuple[Array, Array]:
    """Parameters z and what exchanges have brought since, d, after ``events``; both (ranks, dim).

    step: z_i = z_i - lr g_i(z_i), then z_i = z_i + d_i and d_i = 0.
    meet: d_i = d_i + (x_j - x_i)/2 and d_j = d_j + (x_i - x_j)/2, where x = z + d.
    """
    z = np.array(start, dtype=np.float64)
    d = np.zeros_like(z)
    for kind, i, other in events:
        if kind == "step":
            z[i] += d[i] - lr * gradient(i, z[i], other)
            d[i] = 0
        else:
            x = z + d
            d[i] += (x[other] - x[i]) / 2
            d[other] += (x[i] - x[other]) / 2
    return z, d
