"""The two slots of a replica, filled with the exchanges of an algorithm."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from offbeat.exchange import (
    Algorithm,
    BoundGradients,
    BoundParameters,
    Exchanged,
    GradientExchange,
    IdleGradients,
    IdleParameters,
    ParameterExchange,
    Site,
)
from offbeat.exchange.samples import Samples
from offbeat.exchange.sharding import load_parts, unsharded
from offbeat.transport.group import Group
from offbeat.transport.interface import Transport
from offbeat.transport.world import World


def reduced(algorithm: Algorithm, world: World, mesh: object = None) -> str | None:
    """Return the warning for nodes on which one slot of ``algorithm`` is disabled, or None.

    ``mesh``: the layout that was given, if any. A world of one rank needs no warning.
    """
    near, far = algorithm.gradients, algorithm.parameters
    if world.size == 1:
        return None
    if far is not None and far.over == "node" and len(world.nodes) == 1:
        return (
            f"all {world.size} ranks are on one node, so that {algorithm} exchanges "
            f"{'gradients inside it only' if near else 'nothing'}; pass "
            f"{'the' if mesh is None else 'other'} nodes as "
            "mesh=offbeat.World.of([[0, 1], ...]), or emulate some: offbeat lab --nodes 2 "
            "--procs-per-node 2 -- python train.py"
        )
    if near is not None and near.over == "local" and len(world.nodes) == world.size:
        return (
            f"every node has one rank, so that {algorithm} exchanges "
            f"{'parameters between nodes only' if far else 'nothing'}; start several ranks on "
            "each node, or pass other nodes as mesh=offbeat.World.of([[0, 1], ...])"
        )
    return None


@final
@dataclass(frozen=True, eq=False)
class SlotFiller:
    """Opens the groups of the slots of ``algorithm`` and binds their exchanges.

    A slot without an exchange, or whose group has one member, stays empty, with one of ``notes``.
    ``transaction``: see :meth:`offbeat.Site.commit`, and ``arrival`` is that of gradients.
    ``registered``: objects whose states a rank that joins gets, ``received`` the states that this
    one has got, and ``saved`` the objects whose states the replica saves, by name. ``samples``:
    what steps stand for, in a run with weights. ``connections``: as :func:`offbeat.replicate` got.
    """

    algorithm: Algorithm
    model: Exchanged
    optimizers: tuple[Optimizer, ...]
    scaler: torch.amp.GradScaler | None
    notes: list[str]
    is_elastic: bool = False
    transaction: Callable[[int | None], None] | None = None
    arrival: Callable[[int | None], None] | None = None
    registered: dict[str, Any] = field(default_factory=dict)
    received: dict[str, Any] = field(default_factory=dict)
    saved: dict[str, Any] = field(default_factory=dict)
    samples: Samples | None = None
    connections: int | None = None

    @property
    def exchanges_again(self) -> bool:
        """Whether the gradients slot goes on after a loss: inside a node a loss ends the node."""
        exchange = self.algorithm.gradients
        return self.is_elastic and exchange is not None and exchange.over == "world"

    @cached_property
    def trained(self) -> tuple[nn.Parameter, ...]:
        """The parameters that are not frozen, for what looks at them in every step."""
        return tuple(self.model.trained.values())

    @cached_property
    def heals(self) -> bool:
        """Whether ranks that miss the result of an exchange can be healed by those that hold it."""
        near, far = self.algorithm.gradients, self.algorithm.parameters
        is_alone = self.exchanges_again and far is None and self.samples is None
        groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        optimized = {id(parameter) for group in groups for parameter in group["params"]}
        is_whole = {id(parameter) for parameter in self.trained} <= optimized
        is_plain = self.scaler is None and not self.model.is_sharded
        return is_alone and is_whole and is_plain and near is not None and near.is_healable

    def gradients(self, links: Transport | None, control: Group | None) -> BoundGradients:
        """Fill the gradients slot; all ranks call."""
        exchange = self.algorithm.gradients
        if exchange is None:
            return IdleGradients(None)
        if self.model.is_sharded and exchange.over == "local":
            self.notes.append(f"the gradients slot is disabled: FSDP2 does {exchange}")
            return IdleGradients(None)
        if (site := self._site("gradients", exchange, links, control)) is None:
            return IdleGradients(None)
        self.notes.extend(exchange.remarks(site))
        return exchange.bind(site)

    def parameters(self, links: Transport | None, control: Group | None) -> BoundParameters:
        """Fill the parameters slot; all ranks call."""
        exchange = self.algorithm.parameters
        if exchange is not None:
            site = self._site("parameters", exchange, links, control)
            if site is not None:
                return exchange.bind(site.counted())
        if links is None:
            return IdleParameters(None)
        return IdleParameters(Site.on("world", links, self.model, control=control).counted())

    def common(self) -> dict[str, Any]:
        """Return the states of optimizers and other objects, for a rank that joins.

        Raises ``ValueError`` if an object that the user has registered raises: one that cannot be
        handed over is no reason for this rank to end.
        """
        registered = {}
        for name, each in self.registered.items():
            try:
                registered[name] = each.state_dict()
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
                raise ValueError(
                    f"state_dict() of the registered {name!r} raised {said}"
                ) from error
        held = [unsharded(each) for each in self._held]
        return {"optimizers": held, "registered": registered}

    def begin_with(self, common: Mapping[str, Any]) -> None:
        """Take over what :meth:`common` has returned on another rank."""
        given = common["optimizers"]
        if len(given) != len(self._held):
            raise ValueError(
                f"the others passed {len(given)} optimizers and scalers to replicate(), this rank "
                f"{len(self._held)}; pass the same"
            )
        for each, state in zip(self._held, given, strict=True):
            load_parts(each, state)
        self.received.update(common["registered"])

    @property
    def _held(self) -> list[Any]:
        return [*self.optimizers, *(() if self.scaler is None else (self.scaler,))]

    def _site(
        self,
        slot: str,
        exchange: GradientExchange | ParameterExchange,
        links: Transport | None,
        control: Group | None,
    ) -> Site | None:
        if links is not None:
            commit = self.transaction if slot == "parameters" else self.arrival
            site = Site.on(
                exchange.over,
                links,
                self.model,
                *(self.optimizers, self.scaler, control, exchange.peers),
                transaction=None if exchange.over == "local" else commit,
                samples=self.samples,
            )
            if site.size > 1 or (exchange.partition and site.inside is not None):
                return site
        self.notes.append(
            f"the {slot} slot is disabled: its group has one member, so {self.algorithm} "
            f"exchanges no {slot}"
        )
        return None
