"""Exchanges bound to a replica: settings at a site, with their state."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from offbeat.exchange.site import Site
from offbeat.exchange.state import Saved, State
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

    def settle(self) -> None:
        """Reset the state: every replica was set to the average."""

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
        self.settle()
        super().load(saved)

    def drain(self) -> float:
        """Merge what is in flight into the parameters, and return the weight; may wait."""
        return 1.0

    def enter(self, weight: float) -> None:
        """Start anew from the parameters as they are, with ``weight``."""


class Idle(BoundParameters):
    """Exchanges nothing, in an empty slot."""

    def step(self, step: int) -> None:
        """Leave the parameters as they are."""
