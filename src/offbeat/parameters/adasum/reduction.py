"""What every wire algorithm of Adasum does, in two phases."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import isfinite

from torch import Tensor

from offbeat.parameters.adasum.rounding import Rounding
from offbeat.parameters.adasum.slices import Piece


@dataclass(frozen=True, eq=False)
class Statistics:
    r"""What all ranks know of an exchange before anything is changed; (layers,) in float64.

    ``energy`` is :math:`\sum_i |g_i|^2`; not finite where some rank's vector is not.
    ``orthogonality`` is :math:`|AS(g)|^2` over it; NaN where all vectors are zero.
    """

    energy: Tensor
    orthogonality: Tensor

    def is_finite(self) -> bool:
        """Whether the exchange may go on; on a GPU this waits for it."""
        return all(map(isfinite, self.energy.tolist()))


class Reduction(ABC):
    """Combines the same slice of all peers, in place; prepared once, for the same tensors.

    Two phases, so that a vector that is not finite stops all ranks before an error of rounding
    is kept. Subclasses are final: compose, do not inherit further.
    """

    @property
    @abstractmethod
    def roundings(self) -> list[tuple[list[Piece], Rounding]]:
        """What rounds to 16 bits on the way, and of which pieces it keeps the errors."""

    @abstractmethod
    def compare(self) -> Statistics:
        """Exchange vectors and learn how they lie to each other; all ranks call."""

    @abstractmethod
    def combine(self) -> None:
        """Write the combination over the slice, equal on all peers; all ranks call."""
