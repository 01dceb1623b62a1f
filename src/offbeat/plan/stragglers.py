"""How much longer than usual each rank computes in each step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@final
@dataclass(frozen=True, kw_only=True)
class Stragglers:
    r"""Draws the factor by which a rank computes longer than the mean in one step.

    .. math:: f = r \cdot (1 + (F - 1)\,[u < q]), \qquad u \sim U(0, 1)

    Independent for every rank and step, and the same for all methods. r is one of ``measured``,
    drawn at random, or else log-normal with a mean of 1 and a standard deviation of ``jitter``.
    With the probability q = ``late_share`` a step takes F = ``late_factor`` times as long.
    Rank 0 computes ``first_factor`` times as long in every step. With ``balanced`` batches follow
    the speeds of the n ranks, with the same sum: then all compute
    :math:`n / (n - 1 + 1 / first\_factor)` times as long.

    >>> Stragglers(late_share=1.0, late_factor=3.0).draw(steps=1, nodes=2, ranks_per_node=1)
    array([[[3.],
            [3.]]])
    """

    jitter: float = 0.0
    measured: Sequence[float] = ()
    late_share: float = 0.0
    late_factor: float = 1.0
    first_factor: float = 1.0
    balanced: bool = False
    seed: int = 0

    def draw(self, steps: int, nodes: int, ranks_per_node: int) -> Array:
        """Return the factors (steps, nodes, ranks per node)."""
        # Streams of their own: the first steps are the same in runs of other lengths.
        random, of_late = np.random.default_rng(self.seed), np.random.default_rng([self.seed, 1])
        shape = steps, nodes, ranks_per_node
        if self.measured:
            factors = random.choice(np.array(self.measured), shape)
        else:
            width = float(np.log1p(self.jitter**2)) ** 0.5
            factors = random.lognormal(-(width**2) / 2, width, shape)
        late = of_late.random(shape) < self.late_share
        factors = np.where(late, self.late_factor, 1.0) * factors
        if self.balanced:
            size = nodes * ranks_per_node
            factors *= size / (size - 1 + 1 / self.first_factor)
        else:
            factors[:, 0, 0] *= self.first_factor
        return np.asarray(factors, np.float64)

    def speed(self, ranks: int) -> float:
        """Return the sum of the speeds of all ranks, in those of one that is never late."""
        late = 1 + self.late_share * (self.late_factor - 1)
        return (ranks - 1 + 1 / self.first_factor) / late
