"""Push-sum over ranks that come one after the other (Assran et al. 2019, with a growing graph)."""

from collections.abc import Callable, Mapping

import numpy as np

from reference.participants import Array
from reference.push_sum import Matrix

Gradient = Callable[[int, Array, int], Array]  # (rank, model, step)
Values = dict[int, Array]
Weights = dict[int, float]


def elastic_sgp(
    start: Mapping[int, Array],
    gradient: Gradient,
    *,
    matrix: Matrix,
    joins: Mapping[int, int],
    steps: int,
    lr: float,
    overlap: int = 0,
) -> tuple[Values, Weights, Weights]:
    """SGP whose ranks are the keys of `start`, and rank `joins[k]` from the exchange of step k on.

    Step k: x = w z + (SGD(z) - z) on all ranks so far. If somebody joins, what is in flight is
    added first, then the next higher rank, or else the lowest, gives it half of its x and its w.
    After that they send by P of their number, rows and columns in the order of ranks. Returns z and
    w by rank, and the weight in flight to each.
    """
    z: Values = {rank: value.copy() for rank, value in start.items()}
    w: Weights = dict.fromkeys(z, 1.0)
    mail: list[tuple[int, int, Array, float]] = []  # step of arrival, receiver, x, w

    for k in range(steps):
        x = {r: w[r] * z[r] - lr * gradient(r, z[r], k) for r in z}
        if k in joins:
            for _, to, x_sent, w_sent in mail:
                x[to], w[to] = x[to] + x_sent, w[to] + w_sent
            mail = []
            new = joins[k]
            giver = min((r for r in x if r > new), default=min(x))
            x[giver], w[giver] = x[giver] / 2, w[giver] / 2
            x[new], w[new] = x[giver].copy(), w[giver]
        ranks = sorted(x)
        if k % max(1, overlap) == 0:
            p = matrix(len(ranks), k // max(1, overlap))
            kept_x = {r: p[i, i] * x[r] for i, r in enumerate(ranks)}
            kept_w = {r: p[i, i] * w[r] for i, r in enumerate(ranks)}
            mail += [
                (k + overlap, to, p[i, j] * x[source], p[i, j] * w[source])
                for i, to in enumerate(ranks)
                for j, source in enumerate(ranks)
                if i != j and p[i, j] > 0
            ]
            x, w = kept_x, kept_w
        for _, to, x_sent, w_sent in [each for each in mail if each[0] == k]:
            x[to], w[to] = x[to] + x_sent, w[to] + w_sent
        mail = [each for each in mail if each[0] > k]
        z = {r: x[r] / w[r] for r in ranks}
    in_flight = {r: float(np.sum([m[3] for m in mail if m[1] == r])) for r in z}
    return z, w, in_flight
