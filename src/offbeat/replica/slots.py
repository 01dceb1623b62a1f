"""The two slots of a replica: an exchange, its state, and the site at which it works."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, final

import torch
from torch import nn
from torch.optim import Optimizer

from offbeat.comm.group import Group
from offbeat.comm.links import Links
from offbeat.comm.sharding import has_shards
from offbeat.exchange import (
    Algorithm,
    BoundParameters,
    GradientExchange,
    Idle,
    ParameterExchange,
    Saved,
    Site,
)

State = TypeVar("State")


@final
@dataclass(eq=False)
class GradientSlot(Generic[State]):
    """The exchange in the gradients slot and what it keeps about this replica.

    An empty slot holds an exchange that does nothing; its ``site`` is None.
    """

    exchange: GradientExchange[State]
    state: State
    site: Site | None

    @property
    def is_empty(self) -> bool:
        """Whether gradients stay as this rank computed them."""
        return self.site is None

    def complete(self) -> bool:
        """Return whether every message of this backward has been launched."""
        return self.exchange.complete(self.state)

    def finish(self) -> None:
        """Complete the exchange of this backward; ``.grad`` then holds the result."""
        self.exchange.finish(self.state)

    def stepped(self) -> None:
        """Begin a new step; before this library writes parameters."""
        self.exchange.stepped(self.state)

    def save(self) -> Saved:
        """Return the state of the exchange as tensors and plain values."""
        return self.exchange.save(self.state)

    def unfit(self, saved: Saved) -> str | None:
        """Return why the exchange cannot load ``saved``, or None."""
        return self.exchange.unfit(self.state, saved)

    def shared(self, saved: Saved) -> Saved:
        """Return the part of a saved state that is equal on all members."""
        return self.exchange.shared(saved)

    def load(self, saved: Saved) -> None:
        """Restore what :meth:`save` returned."""
        self.exchange.load(self.state, saved)

    def inherit(
        self, saved: Mapping[int, Saved], before: int, rank: int, size: int
    ) -> Saved | None:
        """Return the state of ``rank`` in a world of another size; see the exchange."""
        return self.exchange.inherit(saved, before, rank, size)

    def stats(self) -> Saved:
        """Return what the exchange adds to ``replica.stats()``."""
        return self.exchange.stats(self.state)


@final
@dataclass(frozen=True, eq=False)
class SlotFiller:
    """Opens the groups of the slots of ``algorithm`` and initializes their exchanges.

    A slot without an exchange, or whose group has one member, stays empty: a world of one rank
    trains as without offbeat, bit for bit. ``notes`` collects remarks about that for the user.
    """

    algorithm: Algorithm
    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    scaler: torch.amp.GradScaler | None
    notes: list[str]

    def gradients(self, links: Links | None, control: Group | None) -> GradientSlot[Any]:
        """Fill the gradients slot; all ranks call."""
        exchange = self.algorithm.gradients
        if exchange is not None:
            if has_shards(self.model) and exchange.over == "local":
                self.notes.append(f"the gradients slot is disabled: FSDP2 does {exchange}")
                return GradientSlot(_NoGradientExchange(), None, None)
            site = self._site("gradients", exchange, links, control)
            if site is not None:
                self.notes.extend(exchange.remarks(site))
                return GradientSlot(exchange, exchange.init(site), site)
        return GradientSlot(_NoGradientExchange(), None, None)

    def parameters(self, links: Links | None, control: Group | None) -> BoundParameters:
        """Fill the parameters slot; all ranks call."""
        exchange = self.algorithm.parameters
        if exchange is not None:
            site = self._site("parameters", exchange, links, control)
            if site is not None:
                return exchange.bind(site)
        everyone = None
        if links is not None:
            everyone = Site.on("world", links, self.model, control=control)
        return Idle(everyone)

    def _site(
        self,
        slot: str,
        exchange: GradientExchange[Any] | ParameterExchange,
        links: Links | None,
        control: Group | None,
    ) -> Site | None:
        if links is not None:
            given = self.optimizers, self.scaler, control
            site = Site.on(exchange.over, links, self.model, *given, exchange.peers)
            if site.size > 1 or (exchange.partition and site.inside is not None):
                return site
        self.notes.append(
            f"the {slot} slot is disabled: its group has one member, so {exchange} exchanges "
            "nothing"
        )
        return None


@final
class _NoGradientExchange(GradientExchange[None]):
    """Leaves every gradient as it is."""

    over = "world"

    def init(self, site: Site) -> None:
        """Keep no state."""

    def ready(self, state: None, name: str) -> None:
        """Send nothing."""

    def complete(self, state: None) -> bool:
        """Return True: no message is outstanding."""
        return True

    def finish(self, state: None) -> None:
        """Leave ``.grad`` as it is."""

    def save(self, state: None) -> Saved:
        """Return an empty state."""
        return {}

    def load(self, state: None, saved: Saved) -> None:
        """Restore nothing."""
