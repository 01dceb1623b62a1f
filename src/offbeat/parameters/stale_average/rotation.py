"""Exchanges between nodes in which groups of equal local rank take turns."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Literal

import torch
from torch import Tensor

from offbeat.comm.collectives import all_reduce, broadcast, mean
from offbeat.comm.handle import Handle
from offbeat.exchange import Site
from offbeat.functional import (
    Layout,
    accumulation_dtype,
    cast_difference,
    flat_view,
    merge_stale_sum,
    pack,
)


@dataclass(eq=False)
class PendingSum:
    """A sum on its way: who speaks for the node, W, and the step that merges it."""

    root: int
    wait: int
    due: int
    handles: list[Handle] = field(default_factory=list)

    def land(self) -> None:
        """Block until the sum is there; twice does nothing more."""
        while self.handles:
            self.handles.pop().wait()


@dataclass(eq=False)
class Rotation:
    """One rank's side of the exchanges, of which ``turn`` counts those that have begun.

    The local rank that speaks for all nodes in an exchange is the ``root`` of a broadcast in each.
    ``flat`` holds the sum in ``flight`` or, in a blocking phase, the reference that all share: the
    last result; ``views`` is the same by name. ``error`` is what casts took from the node's
    differences, the same on all of its ranks; ``message`` is what they are cast into.
    """

    site: Site
    layout: Layout
    flat: list[Tensor]
    views: dict[str, Tensor]
    error: list[Tensor]
    message: list[Tensor]
    turn: int = 0
    flight: PendingSum | None = None

    @classmethod
    def of(cls, site: Site, wire: Literal["bf16"] | None) -> "Rotation":
        """With room for one sum and, with a 16-bit wire, for messages and what casts take."""
        layout = Layout.of(site.parameters, site.slices)
        flat = wide_sections(layout, site.device)
        error = [torch.zeros_like(part) for part in flat if wire is not None]
        message = [torch.zeros_like(part, dtype=torch.bfloat16) for part in error]
        turns = cls(site, layout, flat, layout.views(flat), error, message)
        turns.restart()
        return turns

    def start(self, wait: int, due: int) -> None:
        """Let the sum of all nodes' models go; nobody waits."""
        root = self._next()
        handles = []
        if self._speaks(root) and self.site.group is not None:
            pack(self.views.values(), self._parameters)
            handles = [all_reduce(part, self.site.group) for part in _filled(self.flat)]
        self.flight = PendingSum(root, wait, due, handles)

    def land(self) -> None:
        """Merge the sum in flight with the model."""
        flight, self.flight = self.flight, None
        assert flight is not None, "something is in flight"
        if self._speaks(flight.root):
            flight.land()
            self._merge(self.flat, flight.wait)
        self._hand_out(flight.root)

    def merged(self) -> tuple[list[Tensor], dict[str, Tensor]]:
        """The model as :meth:`land` would leave it, in memory of its own; the sum flies on."""
        site, flight = self.site, self.flight
        flat = wide_sections(self.layout, site.device, site.chunks)
        views = self.layout.views(flat)
        if flight is None:
            pack(views.values(), self._parameters)
            return flat, views
        whole = [part[: len(total)] for part, total in zip(flat, self.flat, strict=True)]
        if self._speaks(flight.root):
            flight.land()
            for part, total in zip(whole, self.flat, strict=True):
                part.copy_(total)
            self._merge(whole, flight.wait)
        self._broadcast(whole, flight.root)
        return flat, views

    def average(self, exact: bool) -> None:
        """Set all models to the nodes' mean; unless ``exact`` from 16-bit differences."""
        root = self._next()
        if exact or not self.error:
            self._exact_mean(root)
        else:
            self._narrow_mean(root)
        self._hand_out(root)

    def restart(self) -> None:
        """All models are equal: they are the reference, and nothing is in flight or was lost."""
        if self.flight is not None:
            self.flight.land()  # before anything is written where the sum arrives
        self.flight = None
        for error in self.error:
            error.zero_()
        pack(self.views.values(), self._parameters)

    def arrived(self) -> dict[str, Tensor]:
        """A copy of the sum in flight, after a wait for it; zeros on who has no part in it."""
        total = wide_sections(self.layout, "cpu")
        if self.flight is not None and self._speaks(self.flight.root):
            self.flight.land()
            for part, arrived in zip(total, self.flat, strict=True):
                part.copy_(arrived)
        return self.layout.views(total)

    @property
    def _parameters(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self.site.parameters.values()]

    def _next(self) -> int:
        self.turn += 1
        return (self.turn - 1) % self.site.slices

    def _speaks(self, root: int) -> bool:
        return self.site.inside is None or self.site.inside.rank == root

    def _merge(self, flat: list[Tensor], wait: int) -> None:
        for x, total in self._pieces(flat):
            merge_stale_sum(total, x, wait, self.site.size)

    def _exact_mean(self, root: int) -> None:
        for error in self.error:
            error.zero_()
        if self._speaks(root) and self.site.group is not None:
            pack(self.views.values(), self._parameters)
            for handle in [mean(part, self.site.group) for part in _filled(self.flat)]:
                handle.wait()

    def _narrow_mean(self, root: int) -> None:
        if self.site.group is None:
            return
        # Every rank whose turn may come casts, so that each knows what its node's casts took: the
        # ranks of a node hold the same model and the same reference.
        for x, reference, error, message in self._pieces(self.flat, self.error, self.message):
            cast_difference(x, reference, error, message)
        if self._speaks(root):
            for handle in [mean(part, self.site.group) for part in _filled(self.message)]:
                handle.wait()
            for reference, difference in zip(self.flat, self.message, strict=True):
                reference.add_(difference)

    def _hand_out(self, root: int) -> None:
        """Give what the speaker holds to all of the node, as their parameters."""
        self._broadcast(self.flat, root)
        pack(self._parameters, self.views.values())
        if [part.dtype for part in self.flat] != list(self.layout.dtypes):
            # The reference is what all hold, as it was rounded; then it need not be saved.
            pack(self.views.values(), self._parameters)

    def _broadcast(self, flat: list[Tensor], root: int) -> None:
        if self.site.inside is not None:
            for handle in [broadcast(part, root, self.site.inside) for part in _filled(flat)]:
                handle.wait()

    def _pieces(self, *flat: list[Tensor]) -> Iterator[tuple[Tensor, ...]]:
        """The parameters as flat tensors, each with its places in flat sections."""
        for parameter, place in zip(self._parameters, self.layout.places.values(), strict=True):
            part = slice(place.offset, place.offset + prod(place.shape))
            x = _as_memory(parameter, self.site.device)
            yield x, *(sections[place.section][part] for sections in flat)


def wide_sections(layout: Layout, device: torch.device | str, chunks: int = 0) -> list[Tensor]:
    """Empty sections in which to add: float32 for 16-bit types."""
    return [part.to(accumulation_dtype(part.dtype)) for part in layout.empty(device, chunks)]


def _filled(flat: list[Tensor]) -> list[Tensor]:
    """Without empty sections, which a group may not send."""
    return [part for part in flat if part.numel() > 0]


def _as_memory(parameter: Tensor, device: torch.device) -> Tensor:
    """A parameter as its memory lies; a copy where it lies elsewhere or has gaps."""
    own = flat_view(parameter) if parameter.device == device else None
    if own is None:
        own = flat_view(torch.empty_like(parameter, device=device).copy_(parameter))
    assert own is not None, "a copy has no gaps"
    return own
