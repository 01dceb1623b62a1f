"""The two slots of a training step, and the interfaces of the exchanges that fill them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, Literal, TypeVar, final

import torch
from torch import Tensor, nn

from offbeat.comm.collectives import all_gather
from offbeat.comm.group import Group, message_device
from offbeat.comm.links import Links
from offbeat.comm.sharding import has_shards, local
from offbeat.comm.world import Axis, World
from offbeat.functional import balance

State = TypeVar("State")
Saved = dict[str, Any]  # nested dicts of tensors and plain values: torch.load(weights_only=True)


@dataclass(frozen=True, eq=False)
class Site:
    """Holds the trainable parameters of a slot, and the groups over which it exchanges.

    ``group`` joins this rank with its counterparts; it is None on a rank that only receives, which
    happens between unequal nodes. ``inside`` joins the ranks of a node for a slot over "node":
    there each local rank exchanges its own slice of every flat tensor (:meth:`slice`), and the
    node then gathers all slices (:meth:`gather`), so that a node sends one model, not one for each
    rank. Of a model sharded by FSDP2, ``parameters`` are this rank's shards, a node is one
    participant, ``inside`` is None, and ``shards`` joins the ranks of the node, for sums over whole
    layers. ``registered`` are the parameters as optimizers hold them, whose ``.grad`` counts:
    DTensors if the model is sharded. ``control`` joins all ranks, for small values.
    """

    model: nn.Module
    registered: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]
    world: World
    axis: Axis
    group: Group | None
    inside: Group | None = None
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    scaler: torch.amp.GradScaler | None = None
    control: Group | None = None
    shards: Group | None = None

    @classmethod
    def on(
        cls,
        axis: Axis,
        links: Links,
        model: nn.Module,
        optimizers: tuple[torch.optim.Optimizer, ...] = (),
        scaler: torch.amp.GradScaler | None = None,
        control: Group | None = None,
        peers: "Callable[[Site], Collection[int] | None] | None" = None,
    ) -> "Site":
        """Open the groups of a slot over ``axis``; all ranks call.

        ``peers`` is :meth:`Exchange.peers`; by default there is no exchange, and ``control`` serves
        for the average of all ranks.
        """
        sharded = has_shards(model)
        axis = "node" if sharded else axis
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        held = {name: local(parameter) for name, parameter in trained.items()}
        given = optimizers, scaler, control
        site = cls(model, trained, held, links.world, axis, None, None, *given)
        if peers is None and axis == "world":
            return replace(site, group=control)
        group = links.open(axis, () if peers is None else peers(site))
        inside = links.open("local") if axis == "node" else None
        if sharded:
            return replace(site, group=group, shards=inside)
        return replace(site, group=group, inside=inside)

    @property
    def size(self) -> int:
        """The number of participants: ranks, or nodes where a node is one participant."""
        if self.axis == "node":
            return len(self.world.nodes)
        return len(self.world.members(self.axis, self.world.local_rank))

    @property
    def rank(self) -> int:
        """The number of this rank's participant."""
        if self.axis == "node":
            return self.world.node
        return self.world.members(self.axis, 0).index(self.world.rank)

    @property
    def slices(self) -> int:
        """The number of slices of the flat tensors."""
        return self.world.slices if self.inside is not None else 1

    @property
    def chunks(self) -> int:
        """The number of slices for which :meth:`gather` needs memory."""
        return self.inside.size if self.inside is not None else 1

    def owners(self) -> dict[str, int]:
        """Return the local rank that owns each parameter in a partition of about equal bytes."""
        sizes = [parameter.nbytes for parameter in self.parameters.values()]
        homes = balance(sizes, len(self.world.nodes[0]))
        return dict(zip(self.parameters, homes, strict=True))

    @property
    def device(self) -> torch.device:
        """The device on which flat tensors must be so that they can be sent."""
        home = next(iter(self.parameters.values())).device
        groups = [group for group in (self.group, self.inside) if group is not None]
        return message_device(groups[0], home) if groups else home

    def slice(self, flat: Tensor) -> Tensor:
        """Return the part of a flat tensor that this rank exchanges, as a view."""
        if self.inside is None:
            return flat
        return flat.view(self.chunks, flat.numel() // self.chunks)[self.inside.rank]

    def gather(self, flat: Sequence[Tensor]) -> None:
        """Complete flat tensors in place from the slices of the node's ranks."""
        if self.inside is not None:
            filled = [f for f in flat if f.numel() > 0]
            for handle in [all_gather(f, self.slice(f), self.inside) for f in filled]:
                handle.wait()


class Exchange(ABC, Generic[State]):
    """Holds the settings of an exchange in one of the two slots; immutable.

    All that it keeps about one replica is its ``State``, which :meth:`init` returns and every
    other method receives. Subclasses of :class:`GradientExchange` and :class:`ParameterExchange`
    are final: compose, do not inherit further.
    """

    def peers(self, site: Site) -> Collection[int] | None:
        """Return the participants with which this one exchanges messages beside collectives.

        By their number; None, the default, for any of them. Groups connect only these, and those
        that sums, gathers and broadcasts from the first need. Participants must name each other.
        ``site`` has no group but ``control``. All ranks call before :meth:`init`, and raise alike.
        """
        return None

    @abstractmethod
    def init(self, site: Site) -> State:
        """Allocate the buffers and return the state; all ranks call, with equal parameters."""

    @abstractmethod
    def save(self, state: State) -> Saved:
        """Return what a resumed run needs to continue bit for bit; no communication.

        Names, shapes and kinds of values must be the same at all times; lists may differ in length.
        """

    @abstractmethod
    def load(self, state: State, saved: Saved) -> None:
        """Restore what :meth:`save` returned; :meth:`unfit` has passed it on all ranks."""

    def unfit(self, state: State, saved: Saved) -> str | None:
        """Return why :meth:`load` cannot take ``saved`` over, or None; no communication.

        Called before anything is loaded. Names, shapes and kinds of values are those of
        :meth:`save`, and tensors are finite. What stands in lists, and the range of plain values,
        is to be checked here.
        """
        return None

    def shared(self, saved: Saved) -> Saved:
        """Return the part of a saved state that the members of the group save alike.

        A load is refused where ranks differ in it.
        """
        return {}


class GradientExchange(Exchange[State]):
    """Combines gradients inside backward: ``.grad`` is complete when ``backward()`` returns."""

    over: Literal["world", "local"]
    # Each gradient is reduced to one rank of the node, which steps the parameter for all of them.
    partition: bool = False
    # Whether torch's DistributedDataParallel does the work; elsewhere a wrapper is an error.
    is_wrapper: ClassVar[bool] = False

    @property
    def takes_shards(self) -> bool:
        """Whether it takes a sharded model: it then accesses gradients by ``dot_grad`` only."""
        return False

    def fault(
        self, parameters: Mapping[str, Tensor], optimizers: Sequence[torch.optim.Optimizer]
    ) -> str | None:
        """Return why these optimizers of this rank cannot be used, or None; no communication.

        All ranks ask before they open a group, also those whose slot will be disabled.
        """
        return None

    def resolved(self, parameters: Mapping[str, Tensor]) -> Mapping[str, object]:
        """Return what functions in the settings give for these parameters; ranks must agree."""
        return {}

    @abstractmethod
    def ready(self, state: State, name: str) -> None:
        """Handle the gradient of parameter ``name``, now accumulated; once per backward."""

    @abstractmethod
    def complete(self, state: State) -> bool:
        """Return whether every parameter was ready since the last :meth:`finish`."""

    @abstractmethod
    def finish(self, state: State) -> None:
        """End the exchange of a backward: send the rest, wait, and write the result."""

    def accumulated(self, state: State, name: str) -> None:
        """Note a gradient of ``name`` that was accumulated in a backward without an exchange."""

    def optimizer_stepped(self, state: State, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer, of this model or of another, has used gradients."""

    def stepped(self, state: State) -> None:
        """Begin a new step: the optimizers have used the gradients that they use."""

    def inherit(
        self, saved: Mapping[int, Saved], before: int, rank: int, size: int
    ) -> Saved | None:
        """Return the state of ``rank`` of ``size``, from what a world of ``before`` ranks saved.

        If the model is sharded, these are the numbers of nodes. By default all ranks save the same
        state, and a world of another size starts anew (None). Raises ``ValueError`` if the state of
        a rank that is needed is missing.
        """
        return next(iter(saved.values()), None) if before == size else None

    def remarks(self, site: Site) -> Sequence[str]:
        """Return notes for the user about what this exchange was given; none by default."""
        return ()

    def stats(self, state: State) -> Saved:
        """Return what to add to ``replica.stats()``; no communication."""
        return {}


class ParameterExchange(Exchange[State]):
    """Combines parameters after the optimizer has stepped."""

    over: Literal["world", "node"]
    # Whether the run survives the loss of a rank. "continue" requires that the parameters are still
    # this rank's own after a wait has raised PeerLost, and that `init` between the survivors is a
    # valid start from parameters that differ.
    on_failure: Literal["raise", "continue"] = "raise"
    # Each rank of a node steps its own share of the parameters, and `step` gathers all of them.
    partition: bool = False
    # Whether `step` may wait for other ranks; then the first one also compares their parameters.
    waits: ClassVar[bool] = True
    # Whether a rank that starts from other parameters than the rest spoils the first exchange.
    starts_equal: ClassVar[bool] = False
    # Whether parameters written between the attach and the first step, on all ranks alike, do so.
    anchored: ClassVar[bool] = False

    @abstractmethod
    def step(self, state: State, step: int) -> None:
        """Exchange if it is due; the optimizer has stepped, after ``step`` earlier steps."""

    @abstractmethod
    def mass(self, state: State) -> tuple[list[Tensor], dict[str, Tensor], float]:
        """Return this participant's part of the average, including what is in flight to it.

        Returns the numerators as flat tensors, one for each dtype of the layout, which the caller
        may overwrite; their views by parameter name, in the parameters' shapes; and the weight.
        The average of the replicas is the sum of numerators over the sum of weights.
        """

    @abstractmethod
    def settle(self, state: State) -> None:
        """Reset the state: every replica was set to the average."""

    @abstractmethod
    def staleness(self, state: State, step: int) -> int:
        """Return the age in steps of the newest parameters received from other participants."""

    def report(self, state: State, loss: float | Tensor) -> None:
        """Receive this rank's loss of the coming step; no communication."""

    def measures(self, state: State) -> dict[str, float]:
        """Return what to add to the measures in ``replica.stats()``; nothing by default."""
        return {}


class ElasticExchange(ParameterExchange[State]):
    """An exchange that others may join: each gets half of the mass of a participant."""

    @abstractmethod
    def growth_fault(self, size: int) -> str | None:
        """Return why ``size`` participants could not exchange, or None."""

    @abstractmethod
    def heard_by_all(self, size: int, sender: int, step: int) -> int:
        """Return a step that nobody begins before a word of ``sender`` has reached it.

        It is out before the first exchange from ``step`` on, and every message carries it on.
        """

    @abstractmethod
    def drain(self, state: State) -> float:
        """Merge what is in flight into the parameters, and return the weight; may wait."""

    @abstractmethod
    def enter(self, state: State, weight: float) -> None:
        """Start anew from the parameters as they are, with ``weight``."""


@final
@dataclass(frozen=True)
class Algorithm:
    """Combines the exchanges of the two slots; built by a recipe, or directly.

    >>> from offbeat.gradients import Mean
    >>> from offbeat.parameters import Average
    >>> Algorithm(gradients=Mean(over="local"), parameters=Average(every=8, over="node"))
    Algorithm(gradients=Mean(over='local', ...), parameters=Average(every=8, over='node', ...))
    """

    gradients: GradientExchange[Any] | None = None
    parameters: ParameterExchange[Any] | None = field(default=None)

    def __post_init__(self) -> None:
        """Raise ValueError for contents that are no exchange, or do not fit together."""
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
                f"partition=True in one slot of {self}: one slot reduces gradients to the owners "
                "of layers, the other gathers the layers they have stepped; set it in both"
            )
        if self.parameters is not None and self.parameters.on_failure == "continue":
            near = "local" if self.parameters.over == "node" else None
            if (self.gradients and self.gradients.over) != near:
                raise ValueError(
                    f"{self} with on_failure='continue' may lose a rank inside backward, and those "
                    "that wait for it; use within=None, within='local', or on_failure='raise'"
                )
