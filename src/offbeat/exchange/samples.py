"""How many samples the steps of a rank stand for, and the shares that follow."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

MOST = 2**53  # samples of a step: sums of whole numbers up to here are exact
ALL_ZERO = (
    "the weights of all ranks are 0, and a mean needs one that is not; pass the number of samples "
    "in the batch to replica.set_weight()"
)


@final
@dataclass(eq=False)
class Samples:
    """What the steps of this rank stand for, as both slots read it."""

    given: float | None = None  # what the script has said
    is_out: bool = False  # whether the rank has run out of data
    total: float = 0.0  # over all steps
    rests: bool = False  # whether ranks compute nothing in some steps

    @property
    def now(self) -> float:
        """The samples of the step at hand; 1 where the script says nothing."""
        if self.is_out:
            return 0.0
        return 1.0 if self.given is None else self.given


@final
@dataclass(eq=False)
class Weights:
    r"""The shares of the participants in the exchange at hand of one slot.

    .. math:: s_i = W_i \Big/ \sum_j W_j

    W is how many samples the steps stand for that the exchange covers. A mean over n participants
    becomes the weighted one once each has multiplied its contribution by its factor :math:`n s_i`,
    whatever the mean is made of.
    """

    samples: Samples
    shares: tuple[float, ...] = ()
    factors: tuple[float, ...] = ()

    def divide(self, amounts: Sequence[float], at_rest: float | None) -> None:
        """Set the shares; ``at_rest`` is the factor of each if all amounts are 0, None an error."""
        size, largest = len(amounts), max(amounts)
        if largest > 0:
            parts = [amount / largest for amount in amounts]  # the sum of amounts may overflow
            self.shares = tuple(part / sum(parts) for part in parts)
            self.factors = tuple(size * share for share in self.shares)
        elif at_rest is not None:
            self.shares, self.factors = (1 / size,) * size, (at_rest,) * size
        else:
            raise ValueError(ALL_ZERO)
