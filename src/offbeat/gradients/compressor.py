"""Compression of flat gradients, and the message that adds error feedback to it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

from offbeat.comm.collectives import all_reduce
from offbeat.comm.group import Group, message_device
from offbeat.comm.handle import Handle
from offbeat.exchange import Site
from offbeat.functional import accumulation_dtype
from offbeat.gradients.call_number import number_of, require_same_call
from offbeat.gradients.dot_grad import gradient_of, put, require_plain
from offbeat.gradients.feedback import FlatFeedback, LayerFeedback
from offbeat.gradients.flat import Flat
from offbeat.gradients.message import Message, Scales


class Compressor(ABC):
    """Exchanges one flat tensor (n), n > 0, in a compressed form.

    :class:`offbeat.gradients.Compressed` makes one for each message, ``compressor(like, group)``,
    and uses it once per backward. Residuals, parameters without a gradient, gradients that are
    not finite, loss scales and checkpoints are handled outside of it.
    """

    @abstractmethod
    def __init__(self, like: Tensor, group: Group) -> None:
        """Prepare for tensors with the shape (n), dtype and device of ``like``."""

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
class CompressedMessage(Message):
    """Gradients that a :class:`Compressor` exchanges, with error feedback.

    Three flat tensors: the former residual, the new one, and the mean, which becomes ``.grad``. A
    fourth once a step has several exchanges.
    A small all-reduce beside each message counts the ranks that have a gradient of each
    parameter, and the ranks on which a value is not finite; it also compares the calls.
    """

    def __init__(
        self,
        site: Site,
        group: Group,
        names: Sequence[str],
        compressor: Callable[[Tensor, Group], Compressor],
    ) -> None:
        self.site, self.group = site, group
        dtype = accumulation_dtype(site.parameters[names[0]].dtype)
        self.residual: FlatFeedback = FlatFeedback(site, names, dtype)
        self.velocity = LayerFeedback({})
        self.mean = Flat.of(site, names, dtype)
        self.compressor = compressor(self.mean.whole, group) if self.mean.whole.numel() else None
        self.missing = set(names)
        self.mine_has = dict.fromkeys(names, False)
        self.had: set[str] = set()  # parameters of which any rank had a gradient
        self.loss_scale = 1.0
        device = message_device(group, self.mean.whole.device)
        self.flags = torch.zeros(len(names) + 2, dtype=torch.int32, device=device)
        self.handle: Handle | None = None

    def add(self, name: str, scales: Scales, *, continues: bool) -> None:
        """Add the gradient, divided by the loss scale, to the residual."""
        # A further backward before the step adds to a mean that is in .grad already: that mean is
        # sent once more, and what is lost of it is part of the new residual.
        grad, acc = gradient_of(self.site.registered[name]), self.residual.next.views[name]
        former = self.residual.latest[name]
        self.mine_has[name] = grad is not None
        if grad is None:
            acc.copy_(former)
        else:
            require_plain(self.group, name, grad)
            torch.add(former, grad, alpha=scales[name].enter, out=acc)
        self.missing.discard(name)

    def launch(self, scales: Scales) -> None:
        """Compress and launch; subtract what was sent."""
        self.loss_scale, acc = next(iter(scales.values())).loss, self.residual.next.whole
        if self.compressor is not None:
            acc.sub_(self.compressor.launch(acc))
        flags = [*self.mine_has.values(), number_of(self.group)]
        self.flags[:-1] = torch.tensor(flags, dtype=torch.int32, device="cpu")
        # An infinity that was sent as one is a NaN here, and one that was clipped is left.
        self.flags[-1:] = acc.isfinite().all().logical_not_()
        self.handle = all_reduce(self.flags, self.group)

    def wait(self) -> bool:
        """Wait for the mean; False if a value was not finite on some rank."""
        assert self.handle is not None, "every message was launched"
        self.mean = self.mean.unless_kept(self.site.registered)
        if self.compressor is not None:
            self.mean.whole.copy_(self.compressor.wait()).mul_(self.loss_scale)
        self.handle.wait()
        self.handle, self.missing = None, set(self.mine_has)
        *counts, numbers, broken = self.flags.tolist()
        require_same_call(self.group, number_of(self.group), numbers / self.group.size)
        self.had = {name for name, n in zip(self.mine_has, counts, strict=True) if n}
        return not broken

    def commit(self) -> None:
        """Put the mean into ``.grad`` and keep the new residuals."""
        self.residual.skip(self.mine_has.keys() - self.had)
        self.residual.commit()
        self._hand_out()

    def undo(self) -> None:
        """Set every ``.grad`` to NaN; the former residuals were not overwritten."""
        self.mean.whole.fill_(torch.nan)
        self._hand_out()

    def _hand_out(self) -> None:
        for name in self.mine_has:
            if name in self.had:
                put(self.site.registered[name], self.mean.views[name])
