"""How far gossip lets workers drift apart, from the spectrum of its graphs."""

import numpy as np

from offbeat.topology.graph import Topology, mixing_matrix


def amplification(topology: Topology, size: int, steps: int, shrink: float = 1.0) -> float:
    r"""The RMS distance to the mean after ``steps`` of unit noise on every worker.

    .. math:: \sqrt{\frac{1}{n} \sum_{k=1}^{K} s^{2k-2} \|P_k \cdots P_1 - J\|_F^2},
        \quad J_{ij} = 1/n

    Each step multiplies distances by s = ``shrink``, what the curvature of the loss leaves of
    them, adds independent noise of unit size to every worker, and multiplies by P. For one
    symmetric graph the sum is :math:`\sum_j \lambda_j^2 (1 - (s \lambda_j)^{2K}) / (1 - (s
    \lambda_j)^2)` over the eigenvalues but 1: the second largest decides in the long run.
    """
    mean = np.full((size, size), 1 / size)
    if topology.period(size) == 1:
        deviation = mixing_matrix(topology, size, 0) - mean
        squares = np.linalg.svd(deviation, compute_uv=False) ** 2
        left = shrink**2 * squares
        return float(np.sqrt((squares * (1 - left**steps) / (1 - left)).sum() / size))
    total, product = 0.0, np.eye(size) - mean
    for k in range(steps):
        product = mixing_matrix(topology, size, k) @ product
        term = float((product**2).sum()) / size
        total += term
        product *= shrink
        if term < 1e-9 * total:
            break
    return float(np.sqrt(total))


def gap(topology: Topology, size: int) -> float:
    """1 minus the factor by which one exchange shrinks a distance, over a period."""
    product = np.eye(size) - np.full((size, size), 1 / size)
    period = topology.period(size)
    for index in range(period):
        product = mixing_matrix(topology, size, index) @ product
    return float(1 - np.linalg.norm(product, 2) ** (1 / period))
