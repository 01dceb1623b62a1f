"""The interface of a compression of gradients."""

from abc import ABC, abstractmethod

from torch import Tensor

from offbeat.transport.group import Group


class Compressor(ABC):
    """Exchanges one flat tensor (n), n > 0, in a compressed form.

    :class:`offbeat.methods.Compressed` makes one for each message, ``compressor(like, group)``,
    and uses it once per backward. Residuals, parameters without a gradient, gradients that are
    not finite, loss scales and checkpoints are handled outside of it.
    """

    def __init__(self, like: Tensor, group: Group) -> None:
        """Keep both; prepare for tensors with the shape (n), dtype and device of ``like``."""
        self.like, self.group = like, group

    @abstractmethod
    def launch(self, acc: Tensor) -> Tensor:
        """Compress ``acc`` (n) and launch its exchange, without waiting for it.

        Called in the same order on all members, so that it may launch collectives. ``acc`` stays
        unchanged. Returns what was sent, decompressed (n): the rest is the residual. Entries that
        are not finite may become anything.
        """

    @abstractmethod
    def wait(self) -> Tensor:
        """Wait for the exchange; return the mean (n) of what all members sent, equal on all."""
