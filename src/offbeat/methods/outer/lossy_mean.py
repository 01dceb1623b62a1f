"""What an average in short messages offers: error feedback, kept and restored."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor

from offbeat.transport.handle import Handle


class LossyMean(ABC):
    """Averages a flat tensor over a group again and again; what a message loses goes in the next.

    The averages are equal on all members bit for bit.
    """

    @property
    @abstractmethod
    def memory(self) -> list[Tensor]:
        """The errors and the buffers of messages."""

    @abstractmethod
    def launch(self, delta: Tensor) -> Handle:
        """Average ``delta`` in place, without waiting."""

    @abstractmethod
    def forget(self) -> None:
        """Discard the errors."""

    @abstractmethod
    def errors(self, numel: int) -> dict[str, Tensor]:
        """Return copies of all errors, at their places in a tensor of ``numel`` values."""

    @abstractmethod
    def restore(self, errors: Mapping[str, Tensor]) -> None:
        """Take over what :meth:`errors` returned."""
