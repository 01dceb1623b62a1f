"""Messages of gradients: what is sent together, with and without error feedback."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from offbeat.exchange import Site
from offbeat.exchange.engine.call_number import number_of, require_same_call
from offbeat.exchange.engine.dot_grad import gradient_of, put, require_plain
from offbeat.exchange.engine.feedback import Feedback
from offbeat.exchange.engine.flat import Flat
from offbeat.exchange.engine.units import Units
from offbeat.functional import LinkCost, accumulation_dtype
from offbeat.transport.group import Group


class Message(ABC):
    """Gradients that are exchanged together.

    In each backward an :class:`~offbeat.exchange.engine.engine.Engine` calls :meth:`launch` once
    no gradient is ``missing``, then :meth:`wait`, then :meth:`commit`.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names, self.missing = list(names), set(names)

    @abstractmethod
    def launch(self) -> None:
        """Launch the exchange."""

    @abstractmethod
    def wait(self) -> bool:
        """Wait for it; return whether all that is checked is finite, alike on all ranks."""

    @abstractmethod
    def commit(self) -> None:
        """Put the combined gradients into ``.grad``."""

    def stepped(self) -> None:  # noqa: B027  # a hook that most kinds do not need
        """Note that a new step begins; nothing unless overridden."""


class FeedbackMessage(Message):
    """A message with residuals, which are kept from step to step.

    Its engine also calls :meth:`add` for each gradient, before :meth:`launch`, and :meth:`undo`
    instead of :meth:`commit` if any rank had a gradient that is not finite. Until then the former
    residuals must stay as they are, bit for bit. It calls :meth:`resolve` when it learns what
    became of gradients.
    """

    feedback: dict[str, Feedback]  # by kind: "residual", and "velocity" of momentum correction

    def remember(self, kind: str, name: str, kept: Tensor) -> None:
        """Start from what another message, or an earlier run, has kept of ``name``."""
        self.feedback[kind].latest[name].copy_(kept)

    def resolve(self, used: Collection[str], discarded: Collection[str], *, is_last: bool) -> None:
        """Resolve residuals and velocities, see :meth:`Feedback.resolve`."""
        for feedback in self.feedback.values():
            feedback.resolve(used, discarded, is_last=is_last)

    @abstractmethod
    def add(self, name: str, *, continues: bool) -> None:
        """Add the gradient of ``name``; ``continues``: to what an exchange of this step has put."""

    @abstractmethod
    def undo(self) -> None:
        """Set every ``.grad`` to NaN and keep the former residuals."""

    def seconds(self, link: LinkCost) -> float:
        """Return the expected duration of the exchange; 0 unless overridden."""
        return 0.0


class FlatMessage(FeedbackMessage):
    """Gradients that are added to flat residuals, of which a part is sent.

    Three flat tensors: the former residuals, ``residual + gradient``, of which the rest becomes
    the new residual, and the mean of what was sent, which becomes ``.grad``.
    """

    def __init__(self, site: Site, group: Group, units: Units, names: Sequence[str]) -> None:
        super().__init__(names)
        self.site, self.group, self.units = site, group, units
        self.dtype = accumulation_dtype(site.parameters[names[0]].dtype)
        self.residual = Feedback(site.parameters, names)
        self.feedback = {"residual": self.residual}
        self.mean = Flat.of(site.parameters, names, self.dtype)
        self.mine_has = dict.fromkeys(names, False)
        self.had: set[str] = set()  # parameters of which any rank had a gradient

    @abstractmethod
    def combine(self, mean: Tensor) -> None:
        """Write the mean of what all members have sent."""

    def add(self, name: str, *, continues: bool) -> None:
        """Add the gradient to the residual."""
        # A further backward before the step adds to a mean that is in .grad already: that mean is
        # sent once more, and what is lost of it is part of the new residual.
        self.accumulate(name, self.read(name), self.units.scales[name].to_residual)

    def accumulate(self, name: str, change: Tensor | None, factor: float) -> None:
        """Add ``factor`` times ``change`` to the residual, if there is any."""
        former, acc = self.residual.latest[name], self.residual.next.views[name]
        if change is None:
            acc.copy_(former)
        else:
            torch.add(former, change, alpha=factor, out=acc)

    def read(self, name: str) -> Tensor | None:
        """Return the gradient of ``name``, and note whether there is one."""
        grad = gradient_of(self.site.registered[name]) if self.site.factor else None
        if grad is not None:
            require_plain(self.group, name, grad)
        self.mine_has[name] = grad is not None
        return grad

    def write_flags(self, flags: Tensor, sent: Tensor) -> None:
        """Say which gradients there are, which call this is, and whether ``sent`` is not finite."""
        # In one go: an element costs as much.
        said = [*self.mine_has.values(), number_of(self.group)]
        here = torch.tensor(said, dtype=torch.int32, device="cpu")
        flags[:-1].copy_(here, non_blocking=True)
        flags[-1:] = sent.isfinite().all().logical_not_()

    def read_flags(self, flags: Tensor, members: int) -> bool:
        """Take rows of flags, each the sum of ``members``; return whether all was finite."""
        numbers = (flags[:, -2] / members).tolist()
        require_same_call(self.group, number_of(self.group), *numbers)
        *counts, _, broken = flags.sum(0).tolist()
        self.had = {name for name, count in zip(self.names, counts, strict=True) if count}
        return not broken

    def commit(self) -> None:
        """Keep what was not sent, and put the mean into ``.grad``."""
        for feedback in self.feedback.values():
            feedback.commit(self.mine_has.keys() - self.had)
        self.mean = self.mean.unless_kept(self.site.registered)
        self.combine(self.mean.whole)
        self._hand_out()

    def undo(self) -> None:
        """Set every ``.grad`` to NaN; the former residuals were not overwritten."""
        self.mean = self.mean.unless_kept(self.site.registered)
        self.mean.whole.fill_(torch.nan)
        self._hand_out()

    def _hand_out(self) -> None:
        for name in self.names:
            if name in self.had:
                put(self.site.registered[name], self.mean.views[name])
            elif not self.site.factor:
                self.site.registered[name].grad = None
