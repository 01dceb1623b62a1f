"""The interface of a message of gradients, of any kind."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping

from torch import Tensor

from offbeat.functional import LinkCost
from offbeat.gradients.feedback import Feedback
from offbeat.gradients.units import Scale

Scales = Mapping[str, Scale]


class Message(ABC):
    """Gradients that are exchanged together, and their residuals from step to step.

    A :class:`~offbeat.gradients.pipeline.Pipeline` calls, in each backward, :meth:`add` for each
    parameter, :meth:`launch` once and :meth:`wait` once, then either :meth:`commit` or, if any
    rank had a gradient that is not finite, :meth:`undo`. Until then the former residuals must
    stay as they are, bit for bit. It calls :meth:`settle` when it learns what became of gradients.

    Attributes:
        missing: parameters whose gradients this backward has not added yet.
        residual: by parameter, in its shape; none for parameters that are always sent whole.
        velocity: the same for momentum correction.
    """

    missing: set[str]
    residual: Feedback
    velocity: Feedback

    def remember(self, name: str, residual: Tensor | None, velocity: Tensor | None) -> None:
        """Start from what another message, or an earlier run, has kept of ``name``."""
        if residual is not None:
            self.residual.remember(name, residual)
        if velocity is not None and name in self.velocity.latest:
            self.velocity.remember(name, velocity)

    def settle(self, used: Collection[str], discarded: Collection[str], *, is_last: bool) -> None:
        """Settle residuals and velocities, see :meth:`Feedback.settle`."""
        self.residual.settle(used, discarded, is_last=is_last)
        self.velocity.settle(used, discarded, is_last=is_last)

    @abstractmethod
    def add(self, name: str, scales: Scales, *, continues: bool) -> None:
        """Add the gradient of ``name``, which is final.

        ``continues``: whether ``.grad`` still holds what an earlier exchange of this step has put
        there, and what was accumulated since.
        """

    @abstractmethod
    def launch(self, scales: Scales) -> None:
        """Launch the exchange of what was added."""

    @abstractmethod
    def wait(self) -> bool:
        """Wait for all members' messages; return whether all are finite, alike on all ranks."""

    @abstractmethod
    def commit(self) -> None:
        """Put the combined gradients into ``.grad`` and keep the new residuals."""

    @abstractmethod
    def undo(self) -> None:
        """Set every ``.grad`` to NaN and keep the former residuals."""

    def stepped(self) -> None:  # noqa: B027  # a hook that most kinds do not need
        """Note that a new step begins; nothing unless overridden."""

    def seconds(self, link: LinkCost) -> float:
        """Return the expected duration of the exchange; 0 unless overridden."""
        return 0.0
