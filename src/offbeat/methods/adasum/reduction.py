"""The interface of the algorithms that reduce vectors by Adasum, in two phases."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import isfinite

from torch import Tensor

from offbeat.methods.adasum.rounding import Rounding
from offbeat.methods.adasum.slice_layout import Piece


@dataclass(frozen=True, eq=False)
class Statistics:
    r"""Statistics of an exchange, known to all ranks before anything is changed.

    Both are (layers,) in float64.

    ``energy`` is :math:`\sum_i |g_i|^2`; not finite where some rank's vector is not.
    ``orthogonality`` is :math:`|AS(g)|^2` over it; NaN where all vectors are zero.
    """

    energy: Tensor
    orthogonality: Tensor

    def is_finite(self) -> bool:
        """Return whether all vectors are finite; synchronizes with a GPU."""
        return all(map(isfinite, self.energy.tolist()))


class Reduction(ABC):
    """Combines the same slice of all participants in place; prepared once for fixed tensors.

    Two phases, so that a vector that is not finite stops all ranks before the error of a rounding
    is stored. Subclasses are final: compose, do not inherit further.
    """

    @property
    @abstractmethod
    def roundings(self) -> list[tuple[list[Piece], Rounding]]:
        """The roundings to 16 bits, each with the pieces whose errors it keeps."""

    @property
    @abstractmethod
    def memory(self) -> list[Tensor]:
        """The buffers of messages and of other participants' vectors."""

    @abstractmethod
    def compare(self) -> Statistics:
        """Exchange vectors and compute their inner products; all ranks call."""

    @abstractmethod
    def combine(self) -> None:
        """Overwrite the slice with the combination, equal on all ranks; all ranks call."""
