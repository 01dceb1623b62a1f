"""The mean of a figure over seeds, and whether two of them differ by more than noise."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot, sqrt
from statistics import fmean, stdev

ERRORS = 2  # standard errors, at least, of a difference that counts


@dataclass(frozen=True)
class Spread:
    """Values of independent runs."""

    values: Sequence[float]

    @property
    def mean(self) -> float:
        return fmean(self.values)

    @property
    def error(self) -> float:
        """The standard error of the mean."""
        return stdev(self.values) / sqrt(len(self.values))

    def is_above(self, other: "Spread") -> bool:
        """Whether the means differ by more than noise, and this is the larger."""
        return self.mean - other.mean > ERRORS * hypot(self.error, other.error)

    def __format__(self, form: str) -> str:
        return f"{self.mean:{form}} ± {self.error:{form}}"
