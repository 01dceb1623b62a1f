"""What a method does with the rows of all workers at once."""

from abc import ABC, abstractmethod
from typing import Any, TypeVar, final

from torch import Tensor

Expected = TypeVar("Expected")


class GradientRule(ABC):
    """Combines gradients after backward: the gradients slot of an algorithm."""

    @abstractmethod
    def combine(self, grads: Tensor) -> Tensor:
        """Return what every worker's optimizer sees (n, d)."""


class ParameterRule(ABC):
    """Exchanges parameters after the optimizer step: the parameters slot of an algorithm."""

    @abstractmethod
    def step(self, x: Tensor, step: int) -> None:
        """Exchange the parameters (n, d) in place, after ``step`` earlier steps."""


@final
class Nothing(GradientRule, ParameterRule):
    """An empty slot."""

    def combine(self, grads: Tensor) -> Tensor:
        """Return the gradients."""
        return grads

    def step(self, x: Tensor, step: int) -> None:
        """Do nothing."""


def require(exchange: Any, **expected: object) -> None:
    """Raise ``ValueError`` if a setting differs from the only one that is simulated."""
    for name, value in expected.items():
        found = getattr(exchange, name)
        if found != value:
            raise ValueError(
                f"{type(exchange).__name__}({name}={found!r}): virtual workers know "
                f"{name}={value!r} only; use offbeat.testing.simulate"
            )
