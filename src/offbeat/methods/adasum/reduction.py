"""The interface of the algorithms that reduce vectors by Adasum, in two phases."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import isfinite

from torch import Tensor

from offbeat.methods.adasum.rounding import Rounding
from offbeat.methods.adasum.slice_layout import Piece


@dataclass(frozen=True, eq=False)
class Statistics:
    """Statistics of an exchange, known to all ranks before anything is changed."""

    energy: Tensor  # (layers,): the sum of squared norms, not finite where a vector is not
    orthogonality: Tensor  # (layers,): |AS(g)|^2 over it, NaN where all vectors are zero

    def is_finite(self) -> bool:
        """Return whether all vectors are finite; synchronizes with a GPU."""
        return all(map(isfinite, self.energy.tolist()))

    def first_nonfinite(self) -> int:
        """Return the first layer of which some vector is not finite."""
        return int((~self.energy.isfinite()).nonzero()[0])


class Reduction(ABC):
    """Combines the same slice of all participants in place; prepared once for fixed tensors.

    Two phases, so that a vector that is not finite stops all ranks before the error of a rounding
    is stored. Subclasses are final: compose, do not inherit further.
    """

    @property
    def roundings(self) -> list[tuple[list[Piece], Rounding]]:
        """The roundings to 16 bits, each with the pieces whose errors it keeps."""
        return []

    @property
    def memory(self) -> list[Tensor]:
        """The buffers of messages and of other participants' vectors."""
        return []

    @abstractmethod
    def compare(self) -> Statistics:
        """Exchange vectors and compute their inner products; all ranks call."""

    @abstractmethod
    def combine(self) -> None:
        """Overwrite the slice with the combination, equal on all ranks; all ranks call."""
