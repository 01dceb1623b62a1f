"""Exchanges between nodes that rotate over the groups of equal local rank."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal

import torch
from torch import Tensor

from offbeat.exchange import Site, State, Variable, count_fault, plain, scratch, tensors
from offbeat.exchange.weights import Window
from offbeat.functional import (
    Layout,
    cast_difference,
    flat_view,
    merge_exact_sum,
    merge_stale_sum,
    pack,
)
from offbeat.transport.collectives import all_reduce, broadcast, mean
from offbeat.transport.handle import Handle


@dataclass(eq=False)
class PendingSum:
    """A sum in flight."""

    root: int  # the local rank that exchanges it
    wait: int  # W
    due: int  # the step that merges it
    handles: list[Handle] = field(default_factory=list)

    def join(self) -> None:
        """Block until the sum has arrived. Idempotent."""
        while self.handles:
            self.handles.pop().wait()


@dataclass(eq=False)
class Rotation(State):
    """One rank's part in the exchanges; tensors are flat, by section.

    In each exchange one local rank, the ``root``, exchanges with its counterparts on the other
    nodes and broadcasts the result in its node.
    """

    site: Site
    layout: Layout
    flat: list[Tensor]  # the sum in flight or, in a blocking phase, the reference: the last result
    views: dict[str, Tensor]  # its tensors by name
    error: list[Tensor]  # what earlier casts took from the node's differences, equal in the node
    message: list[Tensor]  # the 16-bit buffers
    carry: list[Tensor]  # what rounding to 16-bit parameters took from the node's model; or none
    sent: list[Tensor]  # the root's model in the sum in flight, for the merge "exact"; or none
    window: Window
    turn: int = 0  # counts the exchanges that have begun
    pending: PendingSum | None = None
    before: list[Tensor] = field(default_factory=list)  # errors, until an average commits

    @classmethod
    def of(
        cls, site: Site, wire: Literal["bf16"] | None, merge: Literal["weighted", "exact"]
    ) -> "Rotation":
        """Allocate the sum, and what the messages and the merge need."""
        layout = Layout.of(site.parameters, site.slices)
        flat = layout.wide(site.device)
        error = [torch.zeros_like(part) for part in flat if wire is not None]
        message = [torch.zeros_like(part, dtype=torch.bfloat16) for part in error]
        carry = [torch.zeros_like(part) for part in flat if layout.is_rounded]
        sent = [torch.zeros_like(part) for part in flat if merge == "exact"]
        given = error, message, carry, sent, Window(site)
        rotation = cls(site, layout, flat, layout.views(flat), *given)
        rotation.restart()
        return rotation

    def start(self, wait: int, due: int) -> None:
        """Start the sum of all nodes' models without waiting for it."""
        root, handles = self._next(), list[Handle]()
        self.window.weigh()
        self.window.send()
        if self._is_root(root) and self.site.group is not None:
            self._pack(self.flat, self.views)
            for sent, part in zip(self.sent, self.flat, strict=False):  # no pair: not "exact"
                sent.copy_(part)
            if self.site.shares is not None:
                for part in self.flat:
                    part.mul_(self.site.factor)
            handles = [all_reduce(part, self.site.group) for part in _filled(self.flat)]
        self.pending = PendingSum(root, wait, due, handles)

    def merge(self) -> None:
        """Merge the sum in flight with the model."""
        pending, self.pending = self.pending, None
        assert pending is not None, "a sum is in flight"
        if self._is_root(pending.root):
            pending.join()
            self.site.commit(pending.due - pending.wait + 1)
            self._merge(self.flat, pending.wait)
        self.window.arrive()
        self._broadcast_result(pending.root)

    def merged(self) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return the model as :meth:`merge` would leave it; the sum stays in flight."""
        site, pending = self.site, self.pending
        flat = self.layout.wide(site.device, site.chunks)
        views = self.layout.views(flat)
        if pending is None:
            self._pack(flat, views)
            return flat, views
        whole = [part[: len(total)] for part, total in zip(flat, self.flat, strict=True)]
        if self._is_root(pending.root):
            pending.join()
            for part, total in zip(whole, self.flat, strict=True):
                part.copy_(total)
            self._merge(whole, pending.wait)
        self._broadcast(whole, pending.root)
        return flat, views

    def average(self, exact: bool) -> None:
        """Set all models to the mean of the nodes; from 16-bit differences unless ``exact``."""
        root, narrows = self._next(), bool(self.error) and not exact
        self.window.weigh()
        if self.site.is_elastic:
            self.before = [error.clone() for error in self.error]
        (self._narrow_mean if narrows else self._exact_mean)(root)
        self.site.commit()
        self.window.close()
        self.before = []
        if narrows and self._is_root(root) and self.site.group is not None:
            for reference, difference in zip(self.flat, self.message, strict=True):
                reference.add_(difference)
        self._broadcast_result(root)

    def undo(self) -> None:
        """Give the errors of casts back what a lost exchange has taken, and count its samples."""
        self.window.undo()
        pack(self.error[: len(self.before)], self.before)
        self.before = []

    def restart(self) -> None:
        """Take the models, now equal, as the reference; discard the sum and all errors."""
        if self.pending is not None:
            self.pending.join()  # before anything is written to the buffer of the sum
        self.pending = None
        self.window.close()
        for lost in (*self.error, *self.carry):
            lost.zero_()
        pack(self.views.values(), self._parameters)

    def state(self) -> Iterator[Variable]:
        """Yield the errors, whose turn it is, and the sum in flight."""
        views = self.layout.views
        yield scratch("message", self.message)
        if self.error:  # the reference; elsewhere a sum, and the next average is exact
            yield tensors("derived", "reference", self.views, ())
        yield plain("shared", self, "turn", count_fault)
        yield tensors("own", "error", views(self.error) if self.error else {}, self.error)
        if self.carry:
            yield replace(
                tensors("own", "carry", views(self.carry), self.carry), write=self._restore_carry
            )
        yield Variable(
            "flight", "in_flight", self._read_flight, self._write_flight, is_compared=True
        )
        yield self._in_flight("sum", self.flat)
        if self.sent:
            yield self._in_flight("sent", self.sent)
        yield from self.window.state()

    def _in_flight(self, name: str, flat: list[Tensor]) -> Variable:
        def read() -> dict[str, Tensor]:
            copies = self.layout.wide("cpu")  # zeros on ranks without a part
            if self.pending is not None and self._is_root(self.pending.root):
                self.pending.join()
                pack(copies, flat)
            return self.layout.views(copies)

        def write(saved: dict[str, Tensor]) -> None:
            if self.pending is not None:  # elsewhere the buffer holds the reference
                self._fill(flat, saved)

        return Variable(name, "in_flight", read, write, memory=flat)

    def _read_flight(self) -> list[int]:
        pending = self.pending
        return [] if pending is None else [pending.root, pending.wait, pending.due]

    def _write_flight(self, flight: list[int]) -> None:
        if flight:
            root, wait, due = flight
            self.pending = PendingSum(root, wait, due)

    def _restore_carry(self, saved: dict[str, Tensor]) -> None:
        """Take over what rounding took; the model with it is the reference."""
        self._fill(self.carry, saved)
        self._pack(self.flat, self.views)

    def _fill(self, flat: list[Tensor], saved: dict[str, Tensor]) -> None:
        views = self.layout.views(flat)
        pack(views.values(), [saved[name] for name in views])

    @property
    def _parameters(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self.site.parameters.values()]

    def _next(self) -> int:
        self.turn += 1
        return (self.turn - 1) % self.site.slices

    def _is_root(self, root: int) -> bool:
        return self.site.inside is None or self.site.inside.rank == root

    def _merge(self, flat: list[Tensor], wait: int) -> None:
        if self.sent:
            for x, total, sent in self._pieces(flat, self.sent):
                merge_exact_sum(total, x, sent, self.site.size)
        else:
            for x, total in self._pieces(flat):
                merge_stale_sum(total, x, wait, self.site.size)

    def _exact_mean(self, root: int) -> None:
        for error in self.error:
            error.zero_()
        if self._is_root(root) and self.site.group is not None:
            self._pack(self.flat, self.views)
            group, shares = self.site.group, self.site.shares
            for handle in [mean(p, group, shares=shares) for p in _filled(self.flat)]:
                handle.wait()

    def _narrow_mean(self, root: int) -> None:
        if self.site.group is None:
            return
        # Every rank casts, not the root alone, so that each knows the error of its node's casts
        # when its turn comes: the ranks of a node hold the same model and the same reference.
        for x, reference, error, message in self._pieces(self.flat, self.error, self.message):
            if self.site.shares is not None:  # before the error of the cast is kept
                x = torch.lerp(reference, x.to(reference.dtype), self.site.factor)
            cast_difference(x, reference, error, message)
        if self._is_root(root):
            for handle in [mean(part, self.site.group) for part in _filled(self.message)]:
                handle.wait()

    def _broadcast_result(self, root: int) -> None:
        """Broadcast the result of the root in its node, and set the parameters to it."""
        self._broadcast(self.flat, root)
        pack(self._parameters, self.views.values())
        if self.carry:
            carried = self.layout.views(self.carry).values()
            pack(carried, self._parameters)
            for carry, precise in zip(self.carry, self.flat, strict=True):
                torch.sub(precise, carry, out=carry)

    def _pack(self, flat: list[Tensor], views: dict[str, Tensor]) -> None:
        """Copy the node's model, with what rounding to 16-bit parameters took from it."""
        pack(views.values(), self._parameters)
        for part, carry in zip(flat, self.carry, strict=False):  # flat may have room for more
            part[: len(carry)].add_(carry)

    def _broadcast(self, flat: list[Tensor], root: int) -> None:
        if self.site.inside is not None:
            for handle in [broadcast(part, root, self.site.inside) for part in _filled(flat)]:
                handle.wait()

    def _pieces(self, *flat: list[Tensor]) -> Iterator[tuple[Tensor, ...]]:
        """Yield the node's model as flat tensors, each with its range of the flat sections."""
        for parameter, place in zip(self._parameters, self.layout.places.values(), strict=True):
            part = slice(place.offset, place.offset + prod(place.shape))
            x = _as_memory(parameter, self.site.device)
            if self.carry:
                x = self.carry[place.section][part] + x
            yield x, *(sections[place.section][part] for sections in flat)


def _filled(flat: list[Tensor]) -> list[Tensor]:
    """Return the sections that are not empty: a group may not send empty tensors."""
    return [part for part in flat if part.numel() > 0]


def _as_memory(parameter: Tensor, device: torch.device) -> Tensor:
    """Return a flat view of a parameter; a copy if it is on another device or has gaps."""
    own = flat_view(parameter) if parameter.device == device else None
    if own is None:
        own = flat_view(torch.empty_like(parameter, device=device).copy_(parameter))
    assert own is not None, "a copy has no gaps"
    return own
