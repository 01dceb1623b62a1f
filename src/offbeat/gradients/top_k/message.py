"""What a message of gradients with error feedback can do, dense or sparse."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor

from offbeat.functional import LinkCost
from offbeat.gradients.top_k.units import Scale

Scales = Mapping[str, Scale]


class Message(ABC):
    """Gradients that travel together, and what is kept of them from step to step.

    A backward calls :meth:`add` for each parameter, :meth:`launch` once and :meth:`wait` once,
    then either :meth:`commit` or, when any rank had a gradient that is not finite,
    :meth:`undo`. Until then the residuals of before are still there, bit for bit.
    """

    missing: set[str]  # parameters that are still to come in this backward
    residual: dict[str, Tensor]  # by parameter, in its shape; none where all is always sent
    velocity: dict[str, Tensor]  # the same for momentum correction

    @abstractmethod
    def remember(self, name: str, residual: Tensor | None, velocity: Tensor | None) -> None:
        """Take over what another message, or an earlier run, kept of ``name``."""

    @abstractmethod
    def add(self, name: str, scales: Scales, *, accumulated: bool) -> None:
        """The gradient of ``name`` is as it will be; ``accumulated``: this backward added to it."""

    @abstractmethod
    def launch(self, scales: Scales) -> None:
        """Send what was added."""

    @abstractmethod
    def wait(self) -> bool:
        """Until everybody's message is there; whether all of them are finite."""

    @abstractmethod
    def commit(self) -> None:
        """Put the combined gradients into ``.grad`` and keep the new residuals."""

    @abstractmethod
    def undo(self) -> None:
        """Make every ``.grad`` NaN and keep the old residuals."""

    @abstractmethod
    def seconds(self, link: LinkCost) -> float:
        """How long it should be on its way."""

    @abstractmethod
    def stepped(self) -> None:
        """What was put into ``.grad`` is spent: what comes there now is new."""
