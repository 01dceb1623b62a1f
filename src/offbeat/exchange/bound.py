"""Exchanges bound to a replica: settings at a site, with their state."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from offbeat.exchange.site import Site
from offbeat.exchange.state import Saved, State
from offbeat.exchange.weights import Window
from offbeat.functional import Layout, pack


@dataclass(eq=False)
class BoundParameters(State, ABC):
    """Combines the parameters at ``site`` after the optimizer has stepped.

    Returned by :meth:`offbeat.ParameterExchange.bind` on all ranks. ``site`` is also the site of
    ``consensus()`` and ``finish()``; it is None in a world of one rank.
    """

    site: Any

    @abstractmethod
    def step(self, step: int) -> None:
        """Exchange if it is due; the optimizer has stepped, after ``step`` earlier steps."""

    def mass(self) -> tuple[list[Tensor], dict[str, Tensor], float]:
        """Return this participant's part of the average, including what is in flight to it.

        Returns the numerators as flat tensors, one for each dtype of the layout, which the caller
        may overwrite; their views by parameter name, in the parameters' shapes; and the weight.
        The average of the replicas is the sum of numerators over the sum of weights. By default
        these are the parameters and 1.
        """
        site: Site = self.site
        layout = Layout.of(site.parameters, site.slices)
        flat = layout.empty(site.device, site.chunks)
        views = layout.views(flat)
        pack(views.values(), site.parameters.values())
        return flat, views, 1.0

    @property
    def result(self) -> dict[str, Tensor] | None:
        """What the last exchange has set the parameters to, by name, equal on all members.

        Kept until the next exchange has committed, for members that miss it after a loss: with what
        :meth:`common` returns it is all that an exchange leaves behind. None if it is not kept.
        """
        return None

    def go_on_with(self, result: Mapping[str, Tensor], common: Saved) -> None:
        """Take over the result of the present exchange, which this member misses."""
        with torch.no_grad():
            pack(self.site.parameters.values(), [result[name] for name in self.site.parameters])
        self.begin_with(common)

    def windows(self) -> Sequence[Window]:
        """Return for each flat tensor of :meth:`mass` the window by whose samples it is weighted.

        None by default: then the weight of :meth:`mass` is all.
        """
        return ()

    def reset(self) -> None:
        """Reset the state: every replica was set to the average."""

    def are_equal(self, steps: int) -> bool:
        """Return whether the last of ``steps`` steps has set all replicas to one model."""
        return False

    def staleness(self, step: int) -> int:
        """Return the age in steps of the newest parameters received from other participants."""
        return 0

    def report(self, loss: float | Tensor) -> None:
        """Receive this rank's loss of the coming step; no communication."""

    def measures(self) -> dict[str, float]:
        """Return what to add to the measures in ``replica.stats()``; nothing by default."""
        return {}

    def load(self, saved: Saved) -> None:
        """Restore what :meth:`save` returned; :meth:`unfit` has accepted it on all ranks."""
        self.reset()
        super().load(saved)

    def drain(self) -> float:
        """Merge what is in flight into the parameters, and return the weight; may wait."""
        return 1.0

    def restart(self, weight: float) -> None:
        """Start anew from the parameters as they are, with ``weight``."""

    def succeed(self, earlier: "BoundParameters") -> None:
        """Take over from the exchange between more ranks, one of which was lost.

        What is own or shared stays; what was in flight is dropped.
        """
        if type(self) is type(earlier):
            self.take(earlier)


class IdleParameters(BoundParameters):
    """Exchanges nothing, in an empty slot."""

    def step(self, step: int) -> None:
        """Leave the parameters as they are."""


@dataclass(eq=False)
class BoundGradients(State, ABC):
    """Combines the gradients of the parameters at ``site`` inside backward.

    Returned by :meth:`offbeat.GradientExchange.bind` on all ranks; ``.grad`` is complete when
    ``backward()`` returns. ``site`` is None in an empty slot.
    """

    site: Any

    @property
    def is_empty(self) -> bool:
        """Whether gradients stay as this rank computed them."""
        return self.site is None

    @abstractmethod
    def ready(self, name: str) -> None:
        """Handle the gradient of parameter ``name``, now accumulated; once per backward."""

    @abstractmethod
    def complete(self) -> bool:
        """Return whether every parameter was ready since the last :meth:`finish`."""

    @abstractmethod
    def finish(self) -> None:
        """End the exchange of a backward: send the rest, wait, and write the result."""

    def accumulated(self, name: str) -> None:
        """Note a gradient of ``name`` that was accumulated in a backward without an exchange."""

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer, of this model or of another, has used gradients."""

    def stepped(self) -> None:
        """Begin a new step, before parameters are written: optimizers have used the gradients."""

    def carry(self, earlier: "BoundGradients") -> None:
        """Go on with what the exchange that filled the slot before has not sent."""

    def left(self) -> list[tuple[Tensor, Tensor]]:
        """Return parameters, each with the gradient that this rank has not sent, if there is one.

        For a rank without mates, which adds it to the next one.
        """
        return []

    @property
    def is_settled(self) -> bool:
        """Whether an exchange changes nothing that ranks share but gradients."""
        return True

    def missed(self) -> None:
        """Note that others hold the result of the present exchange, which was lost here."""

    def stats(self) -> Saved:
        """Return what to add to ``replica.stats()``; no communication."""
        return {}

    def succeed(self, earlier: "BoundGradients") -> None:
        """Take over from the exchange between more ranks, one of which was lost."""
        if type(self) is type(earlier):
            self.load(earlier.save())


@dataclass(eq=False)
class IdleGradients(BoundGradients):
    """Exchanges nothing, in an empty slot; adds what was left when the last mate went."""

    rest: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether gradients stay as this rank computed them."""
        return not self.rest

    def ready(self, name: str) -> None:
        """Send nothing."""

    def complete(self) -> bool:
        """Return True: no message is outstanding."""
        return True

    def finish(self) -> None:
        """Leave ``.grad`` as it is, but for what was left."""
        for parameter, gradient in self.rest:
            if parameter.grad is not None:
                parameter.grad.add_(gradient)
        self.rest = [(p, gradient) for p, gradient in self.rest if p.grad is None]

    def load(self, saved: Saved) -> None:
        """Forget what was left: a state that is loaded is of another moment."""
        self.rest = []

    def succeed(self, earlier: BoundGradients) -> None:
        """Keep what the exchange between more ranks has not sent, until the next backward."""
        self.rest = earlier.left()
