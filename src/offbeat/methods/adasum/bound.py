"""Adasum on one replica: its state, and the exchange of updates."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite

import torch
from torch import Tensor

from offbeat.exchange import (
    BoundParameters,
    Site,
    Variable,
    count_fault,
    plain,
    scratch,
    tensors,
)
from offbeat.exchange.guard import Nonfinite, error_of_second_skip, error_of_step
from offbeat.exchange.state import Kind
from offbeat.exchange.weights import Window
from offbeat.functional import Layout, flat_view, pack
from offbeat.methods.adasum.method import Method, build_reduction
from offbeat.methods.adasum.reduction import Reduction, Statistics
from offbeat.methods.adasum.rounding import Rounding
from offbeat.methods.adasum.slice_layout import Piece, SliceLayout
from offbeat.topology.schedule import due
from offbeat.transport.collectives import broadcast
from offbeat.transport.small_gathers import gather_numbers


@dataclass(eq=False)
class BoundAdasum(BoundParameters):
    """:class:`AdasumUpdate` on one replica.

    ``anchor`` holds the parameters after the last exchange, not rounded to 16 bits, and ``flat``
    the updates; both are flat tensors by section, of the parameters in ``held``: all of them or,
    with ``partition``, this rank's share. ``owners`` are the local ranks that own the others.
    ``orthogonality`` (layers,) is that of the last exchange, and ``at_fault`` whether this rank
    made it one that was skipped. ``is_discarded``: its result was not finite. ``before``: the
    errors of roundings before an exchange that has not committed, in an elastic run.
    """

    site: Site
    layout: Layout
    held: Layout
    owners: dict[str, int]
    slice_layout: SliceLayout
    flat: list[Tensor]
    anchor: list[Tensor]
    reduction: Reduction
    orthogonality: Tensor
    every: int
    method: Method
    wire: str | None
    partition: bool
    nonfinite: Nonfinite
    skipped: int = 0
    at_fault: bool = False
    is_discarded: bool = False
    before: list[list[Tensor]] = field(default_factory=list)
    window: Window = field(init=False)

    def __post_init__(self) -> None:
        """Begin the first window."""
        self.window = Window(self.site)

    def state(self) -> Iterator[Variable]:
        """Yield the anchor, the errors of roundings, and the count of skipped steps.

        Between exchanges of every step the anchor equals the parameters, unless they are rounded.
        """
        yield scratch("flat", self.flat)
        yield scratch("reduction", self.reduction.memory)
        yield plain("shared", self, "skipped", count_fault)
        if self.nonfinite == "skip":
            yield plain("own", self, "at_fault")
        kind: Kind = "shared" if self.every > 1 or self.layout.is_rounded else "derived"
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
        def read() -> dict[str, Tensor]:
            full = [torch.zeros_like(flat) for flat in self.flat]
            for piece, error in zip(pieces, rounding.errors, strict=True):
                piece.of(self._slices(full)).copy_(error)
            return {name: view.clone() for name, view in self.held.views(full).items()}

        def write(saved: dict[str, Tensor]) -> None:
            full = [torch.zeros_like(flat) for flat in self.flat]
            views = self.held.views(full)
            pack(views.values(), [saved[name] for name in views])
            for piece, error in zip(pieces, rounding.errors, strict=True):
                error.copy_(piece.of(self._slices(full)))

        return Variable(name, "own", read, write, memory=rounding.errors)

    def step(self, step: int) -> None:
        """Combine the updates if an exchange is due."""
        if self.site.size == 1 or not due(step, self.every):
            self._broadcast_shares()
            return
        self.window.weigh()
        self._update()
        if self.site.is_elastic:
            self.before = [[e.clone() for e in r.errors] for _, r in self.reduction.roundings]
        statistics = self.reduction.compare()
        self.is_discarded = not statistics.is_finite()
        if statistics.is_finite():
            self.reduction.combine()
            if not self.partition:
                self.site.gather(self.flat)
        self.site.commit()
        self.window.close()
        self.before = []
        if statistics.is_finite():
            self.at_fault = False
            self.orthogonality = statistics.orthogonality
            for anchor, combined in zip(self.anchor, self.flat, strict=True):
                anchor.add_(combined)
        else:
            error, is_second = self._nonfinite_error(statistics)
            if self.nonfinite == "raise" or is_second:
                raise error
            self.skipped += 1
        pack(self._parameters(), self.held.views(self.anchor).values())
        self._broadcast_shares()

    def mass(self) -> tuple[list[Tensor], dict[str, Tensor], float]:
        """Return the model after the exchange that is due, equal on all ranks, and weight one.

        Flat tensors by section and their views by name, in full precision, with the errors of
        earlier roundings. The state does not change.
        """
        whole = self.layout.wide(self.site.device, self.site.chunks * self.site.size)
        views = self.layout.views(whole)
        if self.site.size == 1:
            self._broadcast_shares()
            pack(views.values(), self.site.parameters.values())
            return whole, views, 1.0
        self.window.weigh(is_average=True)
        slices, reduction = self._update(), self.reduction
        if self.wire is not None:
            for pieces, rounding in reduction.roundings:
                for piece, error in zip(pieces, rounding.errors, strict=True):
                    piece.of(slices).add_(error)
            reduction = build_reduction(self.method, self.slice_layout, slices, None)
        statistics = reduction.compare()
        if not statistics.is_finite():
            raise self._nonfinite_error(statistics)[0]
        reduction.combine()
        own = zip(self._slices(whole), slices, self._slices(self.anchor), strict=True)
        for result, update, anchor in own:
            torch.add(anchor, update, out=result)
        self.site.gather(whole)
        return whole, views, 1.0

    @property
    def result(self) -> dict[str, Tensor] | None:
        """The anchor; not kept if roundings leave errors, or ranks hold shares or skip steps."""
        is_plain = self.wire is None and not self.layout.is_rounded and not self.partition
        is_kept = is_plain and self.nonfinite == "raise" and not self.is_discarded
        return self.held.views(self.anchor) if is_kept else None

    def reset(self) -> None:
        """Start anew from equal replicas: anchor = parameters, no rounding errors."""
        pack(self.held.views(self.anchor).values(), self._parameters())
        for _, rounding in self.reduction.roundings:
            rounding.forget()
        self.window.close()

    def staleness(self, step: int) -> int:
        """Return the number of steps since the last exchange."""
        return step % self.every

    def measures(self) -> dict[str, float]:
        """Return the orthogonality of each layer that changed, their mean, and skipped steps.

        1 where the last updates were orthogonal, 1/n where they were equal: the paper's Fig. 2.
        """
        found = {
            f"orthogonality/{name}": value
            for name, value in zip(self.layout.places, self.orthogonality.tolist(), strict=True)
            if isfinite(value)
        }
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

    def _nonfinite_error(self, statistics: Statistics) -> tuple[ValueError, bool]:
        """Return the error that names a non-finite parameter, and whether its rank is so again.

        Equal on all ranks, and of a rank that is so again if there is one, else of the first.
        """
        site, names = self.site, list(self.layout.places)
        node = site.inside or site.shards
        own = [i for i, p in enumerate(site.parameters.values()) if not p.isfinite().all()]
        again, self.at_fault = self.at_fault and bool(own), bool(own)
        found = torch.tensor([-1, 0, own[0] if own else -1, again], device=site.device)
        # Those inside first: where a node's ranks share the layers, or hold shards of them, only
        # one of them has the value.
        for group in (node, site.group):
            if group is not None:
                everyone = gather_numbers(found.tolist(), group)
                bad = [member for member, (_, _, layer, _) in enumerate(everyone) if layer >= 0]
                if bad:
                    member = max(bad, key=lambda member: everyone[member][3])  # the first of equals
                    _, local, *what = map(int, everyone[member])
                    place = (-1, member) if group is node else (member, local)
                    found = torch.tensor([*place, *what], device=site.device)
        if node is not None:
            broadcast(found, 0, node).wait()
        participant, local, layer, again = found.tolist()
        if layer < 0:
            layer = int((~statistics.energy.isfinite()).nonzero()[0])
            error = ValueError(
                f"the updates of parameter {names[layer]!r} are too large to be combined; lower "
                "the learning rate, or clip gradients"
            )
            return error, False
        nodes, ranks = site.world.nodes, site.world.ranks
        rank = nodes[participant][local] if site.axis == "node" else ranks[participant]
        kind = error_of_second_skip if again else error_of_step
        return kind(f"rank {rank}", names[layer]), bool(again)
