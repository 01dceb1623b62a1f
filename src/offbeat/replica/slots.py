"""The two slots of a replica: an exchange, its state, and the site at which it works."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.comm.group import Group
from offbeat.comm.links import Links
from offbeat.comm.sharding import has_shards
from offbeat.exchange import (
    Algorithm,
    ElasticExchange,
    GradientExchange,
    ParameterExchange,
    Saved,
    Site,
)
from offbeat.functional import Layout, pack

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
@dataclass(eq=False)
class ParameterSlot(Generic[State]):
    """The exchange in the parameters slot and what it keeps about this replica.

    ``site`` is also the site of ``consensus()`` and ``finish()``: in an empty slot it joins all
    ranks, and it is None in a world of one rank.
    """

    exchange: ParameterExchange[State]
    state: State
    site: Site | None

    def step(self, step: int) -> None:
        """Exchange after the optimizer step that follows ``step`` earlier ones."""
        self.exchange.step(self.state, step)

    def mass(self) -> tuple[list[Tensor], dict[str, Tensor], float]:
        """Return flat numerators, their views by name, and the weight."""
        return self.exchange.mass(self.state)

    def settle(self) -> None:
        """Discard everything in flight: all replicas are equal now."""
        self.exchange.settle(self.state)

    def drain(self) -> float:
        """Merge what is in flight into the parameters; return the weight."""
        if isinstance(self.exchange, ElasticExchange):
            return self.exchange.drain(self.state)
        return 1.0  # an empty slot: this rank is alone

    def enter(self, weight: float) -> None:
        """Start anew from the parameters as they are, with ``weight``."""
        if isinstance(self.exchange, ElasticExchange):
            self.exchange.enter(self.state, weight)

    def staleness(self, step: int) -> int:
        """Return the age in steps of the newest parameters received from another rank."""
        return self.exchange.staleness(self.state, step)

    def report(self, loss: float | Tensor) -> None:
        """Pass on this rank's training loss."""
        self.exchange.report(self.state, loss)

    def measures(self) -> dict[str, float]:
        """Return what the exchange measured in its last exchange."""
        return self.exchange.measures(self.state)

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


def empty_slot(site: Site | None) -> ParameterSlot[Any]:
    """Return a parameters slot that exchanges nothing, for averages over ``site``."""
    return ParameterSlot(_NoParameterExchange(), site, site)


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

    def parameters(self, links: Links | None, control: Group | None) -> ParameterSlot[Any]:
        """Fill the parameters slot; all ranks call."""
        exchange = self.algorithm.parameters
        if exchange is not None:
            site = self._site("parameters", exchange, links, control)
            if site is not None:
                return ParameterSlot(exchange, exchange.init(site), site)
        everyone = None
        if links is not None:
            everyone = Site.on("world", links, self.model, control=control)
        return empty_slot(everyone)

    def _site(
        self,
        slot: str,
        exchange: GradientExchange[Any] | ParameterExchange[Any],
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


@final
class _NoParameterExchange(ParameterExchange[Site | None]):
    """Leaves every parameter as it is."""

    over = "world"

    def init(self, site: Site) -> Site:
        """Keep the site alone."""
        return site

    def step(self, state: Site | None, step: int) -> None:
        """Send nothing."""

    def mass(self, state: Site | None) -> tuple[list[Tensor], dict[str, Tensor], float]:
        """Return a flat copy of the parameters with weight one."""
        assert state is not None, "a world of one rank has nothing to average"
        layout = Layout.of(state.parameters, state.slices)
        flat = layout.empty(state.device, state.chunks)
        views = layout.views(flat)
        pack(views.values(), state.parameters.values())
        return flat, views, 1.0

    def settle(self, state: Site | None) -> None:
        """Discard nothing."""

    def staleness(self, state: Site | None, step: int) -> int:
        """Return zero: no parameters are received."""
        return 0

    def save(self, state: Site | None) -> Saved:
        """Return an empty state."""
        return {}

    def load(self, state: Site | None, saved: Saved) -> None:
        """Restore nothing."""
