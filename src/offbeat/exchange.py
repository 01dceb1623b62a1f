"""The two moments of a training step at which replicas can talk, and what fills them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar, final

import torch
from torch import Tensor, nn

from offbeat.comm.collectives import all_gather
from offbeat.comm.group import Group, message_device
from offbeat.comm.links import Links
from offbeat.comm.world import Axis, World
from offbeat.functional import balance

State = TypeVar("State")
Saved = dict[str, Any]  # nested dicts of tensors and plain values: torch.load(weights_only=True)


@dataclass(frozen=True, eq=False)
class Site:
    """Where a slot works: the trainable parameters, and the groups over which to exchange.

    ``group`` joins this rank with its partners; it is None on a rank that only receives, which
    happens between unequal nodes. Between nodes each local rank exchanges its own slice of every
    flat tensor (:meth:`slice`), and the node then gathers all of them (:meth:`gather`), so that
    a node puts one model on the wire. ``control`` joins all ranks, for small values that all compare.
    """

    model: nn.Module
    parameters: Mapping[str, Tensor]
    world: World
    axis: Axis
    group: Group | None
    inside: Group | None = None
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    scaler: torch.amp.GradScaler | None = None
    control: Group | None = None

    @classmethod
    def on(
        cls,
        axis: Axis,
        links: Links,
        model: nn.Module,
        optimizers: tuple[torch.optim.Optimizer, ...] = (),
        scaler: torch.amp.GradScaler | None = None,
        control: Group | None = None,
    ) -> "Site":
        """Open the groups of a slot that works over ``axis``; all ranks must call."""
        group = links.open(axis)
        inside = links.open("local") if axis == "node" else None
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        world = links.world
        return cls(model, parameters, world, axis, group, inside, optimizers, scaler, control)

    @property
    def size(self) -> int:
        """The number of participants: ranks, or nodes where a node is one participant."""
        if self.axis == "node":
            return len(self.world.nodes)
        return len(self.world.members(self.axis, self.world.local_rank))

    @property
    def rank(self) -> int:
        """This participant's number."""
        if self.axis == "node":
            return self.world.node
        return self.world.members(self.axis, 0).index(self.world.rank)

    @property
    def slices(self) -> int:
        """Into how many slices the flat tensors are cut."""
        return self.world.slices if self.axis == "node" else 1

    @property
    def chunks(self) -> int:
        """How many slices of room :meth:`gather` needs."""
        return self.inside.size if self.inside is not None else 1

    def owners(self) -> dict[str, int]:
        """The local rank that steps each parameter in a partition: whole ones, equal bytes."""
        sizes = [parameter.nbytes for parameter in self.parameters.values()]
        homes = balance(sizes, len(self.world.nodes[0]))
        return dict(zip(self.parameters, homes, strict=True))

    @property
    def device(self) -> torch.device:
        """Where flat tensors must live so that they can be sent."""
        home = next(iter(self.parameters.values())).device
        groups = [group for group in (self.group, self.inside) if group is not None]
        return message_device(groups[0], home) if groups else home

    def slice(self, flat: Tensor) -> Tensor:
        """The part of a flat tensor that this rank exchanges."""
        if self.inside is None:
            return flat
        return flat.view(self.chunks, flat.numel() // self.chunks)[self.inside.rank]

    def gather(self, flat: Sequence[Tensor]) -> None:
        """Complete flat tensors from the slices of the node's ranks, in place."""
        if self.inside is not None:
            filled = [f for f in flat if f.numel() > 0]
            for handle in [all_gather(f, self.slice(f), self.inside) for f in filled]:
                handle.wait()


class GradientExchange(ABC, Generic[State]):
    """Combines gradients inside backward: ``.grad`` is complete when ``backward()`` returns.

    An exchange is an immutable description; what it knows about one replica is its ``State``.
    Subclasses are final: compose, do not inherit further.
    """

    over: Literal["world", "local"]
    # Gradients come to one rank of a node each, which then steps the parameter for all of them.
    partition: bool = False

    @abstractmethod
    def init(self, site: Site) -> State:
        """Prepare the buffers; all ranks call, once."""

    @abstractmethod
    def ready(self, state: State, name: str) -> None:
        """The gradient of parameter ``name`` has been accumulated; called once per backward."""

    @abstractmethod
    def complete(self, state: State) -> bool:
        """Whether every parameter was ready since the last :meth:`finish`."""

    @abstractmethod
    def finish(self, state: State) -> None:
        """Backward is over: exchange what is left, wait, and put the result into ``.grad``."""

    def stepped(self, state: State) -> None:
        """The step is over: what :meth:`finish` put into ``.grad`` is spent."""

    @abstractmethod
    def save(self, state: State) -> Saved:
        """What a resumed run needs to go on bit for bit; no communication."""

    @abstractmethod
    def load(self, state: State, saved: Saved) -> None:
        """Take over what :meth:`save` returned."""

    def inherit(
        self, saved: Mapping[int, Saved], before: int, rank: int, size: int
    ) -> Saved | None:
        """What ``rank`` of ``size`` goes on with, of what ranks of a world of ``before`` saved.

        Here all ranks save the same, and a world of another size starts anew (None). Raises
        ``ValueError`` if the part of a rank is missing without which it would not go on.
        """
        return next(iter(saved.values())) if before == size else None

    def stats(self, state: State) -> Saved:
        """What ``replica.stats()`` shows of it besides bytes and times; no communication."""
        return {}


class ParameterExchange(ABC, Generic[State]):
    """Combines parameters after the optimizer has stepped.

    An exchange is an immutable description; what it knows about one replica is its ``State``.
    Subclasses are final: compose, do not inherit further.
    """

    over: Literal["world", "node"]
    # What a lost rank means. "continue": after a wait has raised PeerLost the parameters are still
    # this rank's own, and `init` between the survivors, from parameters that differ, is a start.
    on_failure: Literal["raise", "continue"] = "raise"
    # Each rank of a node steps its own share of the parameters, and `step` hands out all of them.
    partition: bool = False

    @abstractmethod
    def init(self, site: Site) -> State:
        """Prepare the buffers; all ranks call, once, when all parameters are equal."""

    @abstractmethod
    def step(self, state: State, step: int) -> None:
        """The optimizer has stepped, after ``step`` earlier steps: exchange if it is time."""

    @abstractmethod
    def mass(self, state: State) -> tuple[list[Tensor], dict[str, Tensor], float]:
        """This participant's part of the average, with what is in flight to it.

        Returns flat numerators (scratch that the caller may overwrite), their named views and
        the weight: the replicas' average is the sum of numerators over the sum of weights.
        """

    @abstractmethod
    def settle(self, state: State) -> None:
        """Every replica was set to the average: forget what came before."""

    @abstractmethod
    def staleness(self, state: State, step: int) -> int:
        """Steps since the newest parameters received from others were sent."""

    def report(self, state: State, loss: float | Tensor) -> None:
        """Hear this rank's loss of the coming step; no communication."""

    def measures(self, state: State) -> dict[str, float]:
        """What else ``replica.stats()`` tells of the last exchange; nothing unless overridden."""
        return {}

    @abstractmethod
    def save(self, state: State) -> Saved:
        """What a resumed run needs to go on bit for bit; no communication."""

    @abstractmethod
    def load(self, state: State, saved: Saved) -> None:
        """Take over what :meth:`save` returned."""


@final
@dataclass(frozen=True)
class Algorithm:
    """A method: what fills the two slots. Made by a recipe, or by hand.

    >>> from offbeat.gradients import Mean
    >>> from offbeat.parameters import Average
    >>> Algorithm(gradients=Mean(over="local"), parameters=Average(every=8, over="node"))
    Algorithm(gradients=Mean(over='local', ...), parameters=Average(every=8, over='node'))
    """

    gradients: GradientExchange[Any] | None = None
    parameters: ParameterExchange[Any] | None = field(default=None)

    def __post_init__(self) -> None:
        """Refuse what is not an exchange, with the fix."""
        for slot, kind in (("gradients", GradientExchange), ("parameters", ParameterExchange)):
            filling = getattr(self, slot)
            if filling is not None and not isinstance(filling, kind):
                raise ValueError(
                    f"the {slot} slot holds {filling!r}, expected a {kind.__name__}; "
                    f"recipes such as offbeat.ddp() and offbeat.sgp() fill the right slots"
                )
        halves = [slot.partition for slot in (self.gradients, self.parameters) if slot]
        if any(halves) and halves != [True, True]:
            raise ValueError(
                f"partition=True in one slot of {self}: one slot brings gradients to the owners "
                "of layers, the other hands out what these have made of them; set it in both"
            )
        if self.gradients is not None and self.parameters and self.parameters.on_failure != "raise":
            raise ValueError(
                f"on_failure='continue' beside {self.gradients!r} in the gradients slot: a loss may "
                "surface inside backward, and what that leaves in .grad is no gradient; leave the "
                "gradients slot empty, or use on_failure='raise'"
            )
