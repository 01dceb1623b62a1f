"""The mean of sparse gradients, and Adam that moves the rows of a sparse gradient alone."""

from collections.abc import Sequence

import numpy as np

from reference.participants import Array

Sparse = tuple[Sequence[int], Array]  # rows, with repetitions, and the values of each


def mean_rows(
    gradients: Sequence[Sparse | None], shares: Sequence[float], shape: tuple[int, int]
) -> tuple[Array, list[int]]:
    """g = sum_p s_p g_p, and the rows that any p has; None: p has no gradient, zeros."""
    total, touched = np.zeros(shape), set[int]()
    for gradient, share in zip(gradients, shares, strict=True):
        if gradient is not None:
            rows, values = gradient
            np.add.at(total, list(rows), share * values)
            touched.update(rows)
    return total, sorted(touched)


class SparseAdam:
    """m, v of touched rows: m += (1-b1)(g-m), v += (1-b2)(g^2-v); the bias of step t, of all."""

    def __init__(self, shape: tuple[int, int], lr: float) -> None:
        self.m, self.v, self.t, self.lr = np.zeros(shape), np.zeros(shape), 0, lr

    def step(self, table: Array, gradient: Array, rows: Sequence[int]) -> Array:
        """x_i -= lr sqrt(1-b2^t)/(1-b1^t) m_i / (sqrt(v_i) + eps) for the touched rows i."""
        self.t += 1
        self.m[rows] += 0.1 * (gradient[rows] - self.m[rows])
        self.v[rows] += 0.001 * (gradient[rows] ** 2 - self.v[rows])
        rate = self.lr * np.sqrt(1 - 0.999**self.t) / (1 - 0.9**self.t)
        moved = table.copy()
        moved[rows] -= rate * self.m[rows] / (np.sqrt(self.v[rows]) + 1e-8)
        return moved
