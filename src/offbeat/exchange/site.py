"""What an exchange works on: the parameters of a slot, and the groups over which it exchanges."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from offbeat.exchange.exchanged import Exchanged
from offbeat.exchange.replicated import Replicated
from offbeat.exchange.samples import Samples, Weights
from offbeat.exchange.sharding import held_part, local
from offbeat.functional import balance
from offbeat.transport.collectives import all_gather
from offbeat.transport.group import Group, message_device
from offbeat.transport.interface import Transport
from offbeat.transport.world import Axis, World


@dataclass(frozen=True, eq=False)
class Site:
    """Holds the trainable parameters of a slot, and the groups over which it exchanges.

    ``group`` joins this rank with its counterparts; it is None on a rank that only receives, which
    happens between unequal nodes. ``inside`` joins the ranks of a node for a slot over "node":
    there each local rank exchanges its own slice of every flat tensor (:meth:`slice`), and the
    node then gathers all slices (:meth:`gather`), so that a node sends one model, not one for each
    rank. Of a model sharded inside nodes, ``parameters`` are this rank's shards, a node is one
    participant, ``inside`` is None, and ``shards`` joins the ranks of the node, for sums over whole
    layers. ``replicated`` are the parts that several of them hold. ``registered`` are the
    parameters as the model registers them and optimizers hold them, whose ``.grad`` counts:
    DTensors if the model is sharded, else ``parameters``. ``control`` joins all ranks, for small
    values that all ranks compare. ``transaction`` is what :meth:`commit` does
    in an elastic run. ``weights`` are those of the exchange at hand, None in a run without them.
    ``sparse`` names the parameters whose gradients are sparse.
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
    replicated: Replicated | None = None
    transaction: Callable[[int | None], None] | None = None
    weights: Weights | None = None
    sparse: frozenset[str] = frozenset()

    @classmethod
    def on(
        cls,
        axis: Axis,
        links: Transport,
        model: Exchanged,
        optimizers: tuple[torch.optim.Optimizer, ...] = (),
        scaler: torch.amp.GradScaler | None = None,
        control: Group | None = None,
        peers: "Callable[[Site], Collection[int] | None] | None" = None,
        transaction: Callable[[int | None], None] | None = None,
        samples: Samples | None = None,
    ) -> "Site":
        """Open the groups of a slot over ``axis``; all ranks call.

        ``peers`` is :meth:`Exchange.peers`; by default there is no exchange, and ``control`` serves
        for the average of all ranks.
        """
        sharded, trained = model.is_sharded, model.trained
        axis = "node" if sharded else axis
        held = {name: local(parameter) for name, parameter in trained.items()}
        site = cls(
            *(model.module, trained, held, links.world, axis, None),
            optimizers=optimizers,
            scaler=scaler,
            control=control,
            transaction=transaction,
            weights=None if samples is None else Weights(samples),
            sparse=model.sparse,
        )
        if peers is None and axis == "world":
            return replace(site, group=control)
        group = links.open(axis, () if peers is None else peers(site))
        inside = links.open("local") if axis == "node" else None
        if sharded:
            parts = None if inside is None else Replicated(model, links.world, inside)
            return replace(site, group=group, shards=inside, replicated=parts)
        return replace(site, group=group, inside=inside)

    def counted(self) -> "Site":
        """Return this site with each part on the one rank of a node that exchanges it; all call."""
        self.copy_replicated()
        parts = self.replicated
        return self if parts is None else replace(self, parameters=parts.counted(self.parameters))

    def copy_replicated(self) -> None:
        """Copy what one rank of a node has exchanged to those that hold it too; these call."""
        if self.replicated is not None:
            with torch.no_grad():
                self.replicated.copy({n: held_part(p) for n, p in self.registered.items()})

    def commit(self, steps: int | None = None) -> None:
        """Call when an exchange has arrived as a whole, before anything of it is written.

        In an elastic run this waits until it has arrived on all ranks. Where one is lost, every
        rank of the others writes it, or none does: then this raises :class:`PeerLost`, and the
        exchange is made again without that rank. It need not wait for gradients with
        :attr:`GradientExchange.is_healable`, nor where :attr:`BoundParameters.result` is kept: a
        rank that misses the result gets it from another. ``steps``: of how many steps each rank's
        work is in the result; None for all so far.
        """
        if self.transaction is not None:
            self.transaction(steps)

    @property
    def is_elastic(self) -> bool:
        """Whether the run goes on when a rank is lost, and lets others join."""
        return self.transaction is not None

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
    def groups(self) -> list[Group]:
        """The groups that were opened for this slot."""
        found = (self.group, self.inside, self.shards)
        return [group for group in found if group is not None and group is not self.control]

    @property
    def shares(self) -> tuple[float, ...] | None:
        """The share of each participant in the mean at hand; None where they are equal."""
        return None if self.weights is None else self.weights.shares

    @property
    def factor(self) -> float:
        """What this participant's contribution to a plain mean is multiplied by: 1 if equal."""
        if self.weights is None:
            return 1.0
        return self.weights.factors[self.rank if self.group is None else self.group.rank]

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
