"""Compression of flat gradients, and the message that adds error feedback to it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

from offbeat.comm.collectives import all_reduce
from offbeat.comm.group import Group, message_device
from offbeat.exchange import Site
from offbeat.gradients.message import FlatMessage
from offbeat.gradients.units import Units


class Compressor(ABC):
    """Exchanges one flat tensor (n), n > 0, in a compressed form.

    :class:`offbeat.gradients.Compressed` makes one for each message, ``compressor(like, group)``,
    and uses it once per backward. Residuals, parameters without a gradient, gradients that are
    not finite, loss scales and checkpoints are handled outside of it.
    """

    def __init__(self, like: Tensor, group: Group) -> None:
        """Prepare for tensors with the shape (n), dtype and device of ``like``."""
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


@final
class CompressedMessage(FlatMessage):
    """Gradients that a :class:`Compressor` exchanges, with error feedback.

    A small all-reduce beside each message counts the ranks that have a gradient of each
    parameter, and the ranks on which a value is not finite; it also compares the calls.
    """

    def __init__(
        self,
        site: Site,
        group: Group,
        units: Units,
        names: Sequence[str],
        compressor: Callable[[Tensor, Group], Compressor],
    ) -> None:
        super().__init__(site, group, units, names)
        like = self.mean.whole
        self.compressor = compressor(like, group) if like.numel() else None
        self.flags = torch.zeros(
            len(names) + 2, dtype=torch.int32, device=message_device(group, like.device)
        )

    def launch(self) -> None:
        """Compress and launch; subtract what was sent."""
        acc = self.residual.next.whole
        if self.compressor is not None:
            acc.sub_(self.compressor.launch(acc))
        # An infinity that was sent as one is a NaN here, and one that was clipped is left.
        self.write_flags(self.flags, acc)
        self.handle = all_reduce(self.flags, self.group)

    def wait(self) -> bool:
        """Wait for the mean; False if a value was not finite on some rank."""
        self.arrived = self.compressor.wait() if self.compressor is not None else None
        self.handle.wait()
        return self.read_flags(self.flags[None], self.group.size)

    def combine(self, mean: Tensor) -> None:
        """Write the mean, which all members have found."""
        if self.arrived is not None:
            mean.copy_(self.arrived).mul_(self.units.scales[self.names[0]].loss)
        self.arrived = None
