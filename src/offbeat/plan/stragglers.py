"""How much longer than usual each rank computes in each step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from offbeat.kit import quantity

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
        random, shape = np.random.default_rng(self.seed), (steps, nodes, ranks_per_node)
        if self.measured:
            factors = random.choice(np.array(self.measured), shape)
        else:
            width = float(np.log1p(self.jitter**2)) ** 0.5
            factors = random.lognormal(-(width**2) / 2, width, shape)
        late = random.random(shape) < self.late_share
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


def parse_jitter(text: str, measured: Sequence[float]) -> dict[str, Any]:
    """Parse "measured", or a standard deviation such as "5%", into arguments of Stragglers.

    ``measured`` are the times of the profile's steps over their mean.

    >>> parse_jitter("5%", ())
    {'jitter': 0.05}
    """
    if text.strip() == "measured":
        if not measured:
            raise ValueError(
                "jitter: got 'measured', but the profile has no \"spread\"; give a standard "
                "deviation, for example 5%"
            )
        return {"measured": measured}
    expected = "'measured' or a percentage, for example 5%"
    return {"jitter": quantity.parse(text, "jitter", {"%": -2}, expected)}


def parse_late(text: str | None) -> dict[str, float]:
    """Parse a share of late steps and their factor, "1%:3x", into arguments of Stragglers.

    None stands for no late steps.

    >>> parse_late("1%:3x")
    {'late_share': 0.01, 'late_factor': 3.0}
    """
    if text is None:
        return {}
    expected = "a percentage and a factor, for example 1%:3x"
    try:
        share, factor = text.split(":")
        late = quantity.parse(share, "late", {"%": -2}, expected, most=1)
        return {"late_share": late, "late_factor": quantity.parse(factor, "late", {"x": 0}, "", 1)}
    except ValueError:
        raise ValueError(f"late: got {text!r}, expected {expected}") from None


def parse_straggler(text: str | None, balanced: bool) -> dict[str, Any]:
    """Parse the fraction of the time that the slow rank computes into arguments of Stragglers.

    None stands for no slow rank.

    >>> parse_straggler("0.5", False)
    {'first_factor': 2.0, 'balanced': False}
    """
    if text is None:
        if balanced:
            raise ValueError("balanced: without a slow rank; add --straggler, for example 0.5")
        return {}
    expected = "the fraction of the time that one rank computes, for example 0.5"
    fraction = quantity.parse(text, "straggler", {"": 0}, expected, 1e-3, 1)
    return {"first_factor": 1 / fraction, "balanced": balanced}
