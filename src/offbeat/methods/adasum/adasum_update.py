"""Adasum of the optimizers' updates since the last exchange."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Annotated, ClassVar, Literal, final

import torch
from torch import Tensor

from offbeat.exchange import (
    BoundParameters,
    ParameterExchange,
    Site,
    Variable,
    count_fault,
    plain,
    scratch,
    tensors,
)
from offbeat.exchange.guard import Nonfinite
from offbeat.exchange.interface import OnLoss
from offbeat.exchange.state import Kind
from offbeat.exchange.weights import Window
from offbeat.functional import Layout, flat_view, pack
from offbeat.methods.adasum.method import Method, build_reduction
from offbeat.methods.adasum.nonfinite import error_of_updates
from offbeat.methods.adasum.participants import Participants
from offbeat.methods.adasum.reduction import Reduction, Statistics
from offbeat.methods.adasum.rounding import Rounding
from offbeat.methods.adasum.slice_layout import Piece, SliceLayout
from offbeat.methods.adasum.touched_rows import TouchedRows
from offbeat.settings import at_least, check_settings
from offbeat.topology.schedule import due
from offbeat.transport.collectives import broadcast


@final
@dataclass(frozen=True, kw_only=True)
class AdasumUpdate(ParameterExchange):
    r"""Add updates where they are orthogonal, average them where they are parallel.

    .. math::
        u_i = x_i - a, \quad x_i \leftarrow a \leftarrow a + AS(u_0, \ldots, u_{n-1})
        \quad \text{if } (k+1) \bmod every = 0

    a is the model after the last exchange, u the change by the optimizer since then; AS acts
    on each parameter tensor by itself, see :func:`offbeat.functional.adasum` and
    :func:`offbeat.functional.tree`. All ranks hold the same model after an exchange, bit for bit;
    with "gather" where their processors are of one kind. A rank whose optimizer skipped its step
    contributes a zero update, which leaves those of the others unchanged.

    ``method`` is the communication algorithm: "gather" (small models), "gram" (one round to each
    other rank, twice), "rvhdd" (the paper's), or "auto", the faster one as measured. ``wire``
    rounds messages to 16 bits; the rounding error is added to the next update. "fp16" scales every
    layer by a power of two, so that small updates do not vanish. ``over="node"``: nodes are the
    participants.

    ``partition`` (over "node"): each rank of a node steps its own share of the layers, whole ones
    (:meth:`offbeat.Site.owners`), which are exchanged between the owners of the same layers. Every
    step then broadcasts the parameters inside the node. A node sends as many times the largest
    share as it has ranks. Anchor, update and rows are those of the share.

    Of embeddings with sparse gradients only the rows that some participant has changed are sent,
    over "world" in full precision: the others are zero in all updates, and in the result.

    An update that is not finite is an error on all ranks alike, before anything is changed; with
    ``nonfinite="skip"`` all ranks return to the anchor instead and continue. A second time in a row
    that is due to the same rank is an error: what its optimizer keeps is not finite either.

    Bytes sent per exchange: 2 (n-1)/n of the model's (of half of it with 16 bits), as an
    all-reduce, and inner products. "gram" sends 8 n^2 a layer to the first rank, which sends the
    sum to n-1 others, up to 128 KiB in all; beyond, by an all-reduce. "rvhdd" sends 32 a layer to
    1, 2, ... log2 n others, 1.8 KB a layer between 1,000. "auto" takes "gram" up to those 128 KiB
    between fewer than 16; else "rvhdd" between 2, 4, 8, ... participants, and up to 2 MiB between
    any number; in other numbers, and with 16 bits on the wire or in memory, "gram". From 8
    participants on it takes "rvhdd" too where "gram" would send more than that does in full
    precision, and more than 2.05 times what is sent of the model. The sum is at most 2.05 models in
    full precision for up to 1,000 participants, where layers have 36 KB on average. "gather": n-1
    times the model's; "auto" takes it for messages of up to 64 KiB, and 512 KiB to all others. In
    the first exchange of "gather" and "gram" also three numbers to each other rank: kernels are
    used only if all have numba and the same processor, or Triton and the same kind of GPU. Extra
    memory: the anchor (float32 for 16-bit parameters: it holds what their rounding takes), the
    update, and one model of rows ("gather": n); with 16 bits rows of half the size, and 1.5 models
    more, with "gram" 1.5/n beside. Passes over memory: six.

    Source: Maleki et al. 2021, sections 3.3 to 3.5 and 4; weighted for any number of
    participants.
    """

    every: Annotated[int, at_least(1, "steps")] = 1
    wire: Literal["bf16", "fp16"] | Annotated[None, "full precision"] = None
    method: Method = "auto"
    over: Literal["world", "node"] = "world"
    nonfinite: Nonfinite = "raise"
    partition: bool = False
    takes_weights: ClassVar[bool] = True
    starts_equal: ClassVar[bool] = True  # the update counts from the parameters at the attach

    def __post_init__(self) -> None:
        check_settings(self)
        if self.partition and self.over != "node":
            raise ValueError(
                "partition=True with over='world': the ranks of a node share the layers; use "
                "over='node'"
            )
        if self.method == "rvhdd" and self.wire is not None:
            raise ValueError(
                f"method='rvhdd' with wire={self.wire!r}: it would round at every level; use "
                "method='gram', which rounds once"
            )

    @property
    def on_loss(self) -> OnLoss | None:
        """Updates are combined again; a lost owner of layers had their optimizer's state."""
        return None if self.partition else "again"

    def bind(self, site: Site) -> "BoundAdasum":
        """Allocate the anchor and the buffers of the exchange."""
        # Every slice is divided again between its participants, into equal shares.
        owners, place = {}, site.inside.rank if site.inside is not None else 0
        if self.partition:
            owners = site.owners()
            layout = Layout.whole(site.parameters, owners, site.slices, site.size)
            mine = {name for name, owner in owners.items() if owner == place}
            held = layout.part(place, site.slices, mine)
        else:
            layout = held = Layout.of(site.parameters, site.slices * site.size)
        room = 0 if self.partition else site.chunks * site.size
        flat, anchor = held.empty(site.device, room), held.wide(site.device, room)
        nested = site.size < site.world.size
        node = site.inside or site.shards
        peers = Participants(site.size, site.group, node, site.slices, nested, place=site.rank)
        part = SliceLayout(layout, peers, place)
        own = flat if self.partition else [site.slice(part) for part in flat]
        whole = self.over == "world" and self.wire is None and site.shards is None
        reduction = (
            TouchedRows(part, own, sorted(site.sparse), self.method)
            if site.sparse and whole and site.group is not None
            else build_reduction(self.method, part, own, self.wire)
        )
        given = owners, part, flat, anchor, reduction, Window(site)
        bound = BoundAdasum(site, self, layout, held, *given)
        bound.reset()
        return bound


@dataclass(eq=False)
class BoundAdasum(BoundParameters):
    """:class:`AdasumUpdate` on one replica; flat tensors are by section."""

    site: Site
    settings: AdasumUpdate
    layout: Layout
    held: Layout  # of all parameters or, with a partition, of this rank's share
    owners: dict[str, int]  # the local ranks that own the others
    slice_layout: SliceLayout
    flat: list[Tensor]  # the updates
    anchor: list[Tensor]  # the parameters after the last exchange, not rounded to 16 bits
    reduction: Reduction
    window: Window
    orthogonality: Tensor | None = None  # (layers,): that of the last exchange
    skipped: int = 0
    at_fault: bool = False  # whether this rank made the last exchange one that was skipped
    is_discarded: bool = False  # whether the last result was not finite
    before: list[list[Tensor]] = field(default_factory=list)  # errors, until an exchange commits

    def state(self) -> Iterator[Variable]:
        """Yield the anchor, the errors of roundings, and the count of skipped steps."""
        yield scratch("flat", self.flat)
        yield scratch("reduction", self.reduction.memory)
        yield plain("shared", self, "skipped", count_fault)
        if self.settings.nonfinite == "skip":
            yield plain("own", self, "at_fault")
        is_kept = self.settings.every > 1 or self.layout.is_rounded
        kind: Kind = "shared" if is_kept else "derived"
        yield tensors(kind, "anchor", self.held.views(self.anchor), self.anchor)
        for index, name in enumerate(("error_of_update", "error_of_combination")):
            if index < len(self.reduction.roundings):
                yield self._rounding(name, *self.reduction.roundings[index])
        yield from self.window.state()

    def undo(self) -> None:
        """Give the errors of roundings back what the messages of a lost exchange have taken."""
        for kept, (_, rounding) in zip(self.before, self.reduction.roundings, strict=False):
            pack(rounding.errors, kept)
        self.before = []

    def _rounding(self, name: str, pieces: Sequence[Piece], rounding: Rounding) -> Variable:
        def zeros() -> tuple[dict[str, Tensor], list[Tensor]]:
            full = [torch.zeros_like(flat) for flat in self.flat]
            return self.held.views(full), [piece.of(self._slices(full)) for piece in pieces]

        def read() -> dict[str, Tensor]:
            views, parts = zeros()
            pack(parts, rounding.errors)
            return views

        def write(saved: dict[str, Tensor]) -> None:
            views, parts = zeros()
            pack(views.values(), [saved[name] for name in views])
            pack(rounding.errors, parts)

        return Variable(name, "own", read, write, memory=rounding.errors)

    def step(self, step: int) -> None:
        """Combine the updates if an exchange is due."""
        if self.site.size == 1 or not due(step, self.settings.every):
            self._broadcast_shares()
            return
        self.window.weigh()
        self._update()
        if self.site.is_elastic:
            self.before = [[e.clone() for e in r.errors] for _, r in self.reduction.roundings]
        statistics = self.reduction.compare()
        self.is_discarded = not statistics.is_finite()
        if not self.is_discarded:
            self.reduction.combine()
            if not self.settings.partition:
                self.site.gather(self.flat)
        self.site.commit()
        self.window.close()
        self.before = []
        if not self.is_discarded:
            self.at_fault = False
            self.orthogonality = statistics.orthogonality
            for anchor, combined in zip(self.anchor, self.flat, strict=True):
                anchor.add_(combined)
        else:
            error, is_second = self._error_of(statistics)
            if self.settings.nonfinite == "raise" or is_second:
                raise error
            self.skipped += 1
        pack(self._parameters(), self.held.views(self.anchor).values())
        self._broadcast_shares()

    def mass(self) -> tuple[list[Tensor], dict[str, Tensor], float]:
        """Return the model after the exchange that is due, in full precision, and weight one."""
        whole = self.layout.wide(self.site.device, self.site.chunks * self.site.size)
        views = self.layout.views(whole)
        if self.site.size == 1:
            self._broadcast_shares()
            pack(views.values(), self.site.parameters.values())
            return whole, views, 1.0
        self.window.weigh(is_average=True)
        slices, reduction = self._update(), self.reduction
        if self.settings.wire is not None:
            for pieces, rounding in reduction.roundings:
                for piece, error in zip(pieces, rounding.errors, strict=True):
                    piece.of(slices).add_(error)
            reduction = build_reduction(self.settings.method, self.slice_layout, slices, None)
        statistics = reduction.compare()
        if not statistics.is_finite():
            raise self._error_of(statistics)[0]
        reduction.combine()
        own = zip(self._slices(whole), slices, self._slices(self.anchor), strict=True)
        for result, update, anchor in own:
            torch.add(anchor, update, out=result)
        self.site.gather(whole)
        return whole, views, 1.0

    @property
    def result(self) -> dict[str, Tensor] | None:
        """The anchor; not kept if roundings leave errors, or ranks hold shares or skip steps."""
        settings = self.settings
        is_exact = settings.wire is None and not self.layout.is_rounded
        is_own = settings.partition or settings.nonfinite == "skip" or self.is_discarded
        return self.held.views(self.anchor) if is_exact and not is_own else None

    def reset(self) -> None:
        """Start anew from equal replicas: anchor = parameters, no rounding errors."""
        pack(self.held.views(self.anchor).values(), self._parameters())
        for _, rounding in self.reduction.roundings:
            rounding.forget()
        self.window.close()

    def staleness(self, step: int) -> int:
        """Return the number of steps since the last exchange."""
        return step % self.settings.every

    def measures(self) -> dict[str, float]:
        """Return the orthogonality of each layer that changed, their mean, and skipped steps.

        1 where the last updates were orthogonal, 1/n where they were equal: the paper's Fig. 2.
        """
        values = [] if self.orthogonality is None else self.orthogonality.tolist()
        layers = zip(self.layout.places, values, strict=bool(values))
        found = {f"orthogonality/{name}": value for name, value in layers if isfinite(value)}
        mean = {"orthogonality": sum(found.values()) / len(found)} if found else {}
        return {"skipped": self.skipped, **mean, **found}

    def _slices(self, flat: list[Tensor]) -> list[Tensor]:
        """Return what this rank exchanges of flat tensors, of those held or of the whole model."""
        lengths = self.slice_layout.lengths
        return [
            part if part.numel() == length else self.site.slice(part)
            for part, length in zip(flat, lengths, strict=True)
        ]

    def _parameters(self) -> list[Tensor]:
        return [self.site.parameters[name] for name in self.held.places]

    def _update(self) -> list[Tensor]:
        """Fill the flat tensors with the optimizer's updates; return this rank's slices."""
        pack(self.held.views(self.flat).values(), self._parameters())
        slices = self._slices(self.flat)
        for update, anchor in zip(slices, self._slices(self.anchor), strict=True):
            update.sub_(anchor.to(update.dtype))
            if self.site.shares is not None:
                update.mul_(self.site.factor)
        return slices

    def _broadcast_shares(self) -> None:
        """Broadcast every layer inside the node from its owner, in place if possible."""
        site, copies, handles = self.site, {}, []
        if site.inside is None or not self.owners:
            return
        for name, parameter in site.parameters.items():
            flat = flat_view(parameter) if parameter.device == site.device else None
            if flat is None:
                flat = copies[name] = parameter.detach().to(site.device).contiguous().view(-1)
            if flat.numel() > 0:
                handles.append(broadcast(flat, self.owners[name], site.inside))
        for handle in handles:
            handle.wait()
        for name, flat in copies.items():
            site.parameters[name].detach().copy_(flat.view(site.parameters[name].shape))

    def _error_of(self, statistics: Statistics) -> tuple[ValueError, bool]:
        """Return the error of all ranks, and whether a rank is not finite again."""
        own = [i for i, p in enumerate(self.site.parameters.values()) if not p.isfinite().all()]
        again, self.at_fault = self.at_fault and bool(own), bool(own)
        names = list(self.layout.places)
        return error_of_updates(self.site, statistics, names, own[0] if own else None, again)
