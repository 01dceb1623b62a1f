"""A part of the model that is averaged and stepped as one: its anchor, and its mean in flight."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from offbeat.exchange import (
    Saved,
    Site,
    State,
    Variable,
    by_name,
    plain,
    scratch,
    sections,
    slices_of,
)
from offbeat.exchange.weights import Window
from offbeat.functional import Layout, accumulation_dtype, blend, pack
from offbeat.functional.messages.narrowing import Narrow
from offbeat.methods.outer.narrow_mean import NarrowMean
from offbeat.methods.outer.optimizer import Builder, OuterOptimizer
from offbeat.methods.outer.sparse_mean import Sparse, SparseMean
from offbeat.transport.collectives import all_reduce, mean
from offbeat.transport.handle import Handle
from offbeat.transport.small_gathers import gather_numbers

Wire = Narrow | Sparse
# Both are equal on all members bit for bit, and what a message loses goes in the next.
LossyMean = NarrowMean | SparseMean


@dataclass(eq=False)
class Fragment(State):
    """Holds the tensors of one fragment, flat by section and in the dtype of sums."""

    site: Site  # with the fragment's parameters alone
    layout: Layout
    flat: list[Tensor]  # the mean while it is in flight
    views: dict[str, Tensor]  # its tensors by name
    anchor: list[Tensor]  # this rank's slice of the parameters after the last outer step
    carry: list[Tensor]  # what rounding to 16-bit parameters has taken from it; empty without
    optimizer: OuterOptimizer  # of the anchor
    lossy: Sequence[LossyMean]  # averages in short messages; empty on a rank without a slice
    is_delayed: bool  # whether training goes on while a mean is in flight
    window: Window
    in_flight: bool = False
    is_discarded: bool = False  # whether the last mean was not finite
    before: dict[str, dict[str, Tensor]] | None = None  # errors, until the exchange commits
    handles: list[Handle] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        site: Site,
        names: Sequence[str],
        outer: str | Builder,
        wire: Wire | None = None,
        is_delayed: bool = False,
    ) -> "Fragment":
        """Allocate for the parameters ``names``, whose values are the first anchor."""
        site = replace(site, parameters={name: site.parameters[name] for name in names})
        layout = Layout.of({n: _wide(p) for n, p in site.parameters.items()}, site.slices)
        flat = layout.empty(site.device, site.chunks)
        anchor = [site.slice(part).clone() for part in flat]
        is_rounded = any(p.dtype.itemsize < 4 for p in site.parameters.values())
        carry = [torch.zeros_like(part) for part in anchor if is_rounded]
        optimizer = OuterOptimizer(outer, anchor)
        lossy = [] if wire is None else _lossy_means(wire, anchor, layout, site)
        given = anchor, carry, optimizer, lossy, is_delayed, Window(site)
        fragment = cls(site, layout, flat, layout.views(flat), *given)
        fragment.restart()
        return fragment

    def send(self) -> None:
        """Launch the mean of all participants' parameters, without waiting for it."""
        self._pack(self.flat, self.views)
        self.in_flight = True
        self.window.weigh()
        self.window.send()
        if (group := self.site.group) is None:
            return
        slices, shares = self._slices(self.flat), self.site.shares
        if not self.lossy:
            self.handles = [mean(part, group, shares=shares) for part in slices if part.numel()]
            return
        if self.site.is_elastic:
            self.before = self._errors()
        for part, anchor, lossy in zip(slices, self.anchor, self.lossy, strict=True):
            if part.numel() == 0:
                continue
            # Differences to the anchor travel: rounding takes little of them. They are weighted
            # before what is lost of them is kept, so that all that is kept counts alike.
            torch.sub(anchor, part, out=part)
            if shares is not None:
                part.mul_(self.site.factor)
            handle = lossy.launch(part)
            handle.then(partial(torch.sub, anchor, part, out=part))
            self.handles.append(handle)

    def send_mass(self, numerators: Mapping[str, Tensor], weight: float) -> None:
        """Launch the sum of all participants' numerators, by name, over that of their weights."""
        self._pack(self.flat, self.views, numerators, weight)
        self.in_flight = True
        if self.site.group is None:
            return
        total = sum(w for (w,) in gather_numbers([weight], self.site.group))
        for part in self._slices(self.flat):
            if part.numel() > 0:
                handle = all_reduce(part, self.site.group)
                handle.then(partial(part.div_, total))
                self.handles.append(handle)

    def merge(self, mixing: float, steps: int | None = None) -> None:
        """Step the anchor by the mean in flight, and blend it into the parameters.

        A mean that is not finite is discarded, and an error on all ranks. ``steps``: as in
        :meth:`offbeat.Site.commit`.
        """
        self.join()
        fault = self._fault_of_mean()
        self.is_discarded = fault is not None
        self.site.commit(steps)
        self.before = None
        self.window.arrive()
        self.in_flight = False  # an average taken after the error must not count it
        if fault is not None:
            raise fault
        if self.site.group is not None:
            self.optimizer.step(self._slices(self.flat))
        self._pack(self.flat, self.views)
        self._blend(self.flat, self.anchor, mixing)
        self.site.gather(self.flat)
        self._write()

    def merged(self, mixing: float) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return the parameters as :meth:`merge` would leave them, valid in this rank's slice."""
        flat = self.layout.empty(self.site.device, self.site.chunks)
        views = self.layout.views(flat)
        self._pack(flat, views)
        if self.in_flight and self.site.group is not None:
            self.join()
            self._blend(flat, self.optimizer.preview(self._slices(self.flat)), mixing)
        return flat, views

    def restart(self) -> None:
        """Take the parameters, now equal, as the anchor; discard the mean and all earlier steps."""
        self.join()  # a handle dropped unwaited breaks the group's next exchanges
        self.in_flight = False
        self.window.close()
        for carry in self.carry:
            carry.zero_()
        for lossy in self.lossy:
            lossy.forget()
        for part in self.flat:  # what fills up a slice too: 8-bit messages share scales with it
            part.zero_()
        self._pack(self.flat, self.views)
        pack(self.anchor, self._slices(self.flat))
        self.optimizer.reset()

    def undo(self) -> None:
        """Count the samples of a mean again that was lost."""
        self.window.undo()

    def take(self, earlier: State) -> None:
        """Take over; each rank sends again what messages in flight and owners of means had lost."""
        super().take(earlier)
        assert isinstance(earlier, Fragment), "an exchange of the same kind"
        errors = earlier.before or earlier._errors()
        if "means" in errors:  # the parts of the new owners are others
            for name, sent in errors["sent"].items():
                sent.add_(errors["means"][name], alpha=self.site.size)
                errors["means"][name].zero_()
        self._restore_errors(errors)

    def unsent(self) -> list[Tensor]:
        """Return what messages have lost, of this rank and of the means that it owns."""
        errors = self._errors()
        for name, error in errors.get("means", {}).items():
            errors["sent"][name].add_(error, alpha=self.site.size)
        return [*errors.get("sent", {}).values()]

    def add_unsent(self, shares: Sequence[Tensor]) -> None:
        """Add to what messages of this rank have lost."""
        errors = self._errors()
        for error, share in zip(errors["sent"].values(), shares, strict=True):
            error.add_(share)
        self._restore_errors(errors)

    def join(self) -> None:
        """Block until the mean in flight has arrived. Idempotent."""
        while self.handles:
            self.handles.pop().wait()

    def state(self) -> Iterator[Variable]:
        """Yield anchor, rounding, the outer optimizer, what messages have lost, and the mean."""
        yield scratch("flat", self.flat)
        yield sections("shared", "anchor", self.anchor, self.site, self.layout)
        yield sections("shared", "carry", self.carry, self.site, self.layout)
        yield Variable(
            "outer",
            "shared",
            lambda: self.optimizer.save(self._by_name),
            lambda saved: self.optimizer.load(saved, self._fill),
            self.optimizer.unfit,
            self.optimizer.memory,
        )
        lost = [tensor for lossy in self.lossy for tensor in lossy.memory]
        yield Variable("errors", "own", self._errors, self._restore_errors, memory=lost)
        yield Variable("mean", "in_flight", self._read_mean, self._write_mean, memory=self.flat)
        state = plain("shared", self, "in_flight", self._fault_in_flight)
        yield replace(state, kind="in_flight")  # equal on all ranks all the same
        yield from self.window.state()

    def save(self) -> Saved:
        """Wait for the mean in flight, and return copies of all."""
        self.join()
        return super().save()

    def load(self, saved: Saved) -> None:
        """Restore what :meth:`save` returned."""
        self.restart()
        super().load(saved)

    def _read_mean(self) -> dict[str, Tensor]:
        if not self.is_delayed:
            return {}
        slices = self._slices(self.flat)
        return self._by_name([m if self.in_flight else torch.zeros_like(m) for m in slices])

    def _write_mean(self, saved: dict[str, Tensor]) -> None:
        if self.is_delayed:
            self._fill(self._slices(self.flat), saved)

    def _fault_in_flight(self, in_flight: bool) -> str | None:
        if in_flight and not self.is_delayed:
            return "a mean is in flight, which cannot be without a delay"
        return None

    def _restore_errors(self, saved: dict[str, dict[str, Tensor]]) -> None:
        restored: list[dict[str, Tensor]] = [{} for _ in self.lossy]
        for kind, named in saved.items():
            self._fill(parts := [torch.zeros_like(part) for part in self.anchor], named)
            for errors, section in zip(restored, parts, strict=True):
                errors[kind] = section
        for lossy, errors in zip(self.lossy, restored, strict=True):
            lossy.restore(errors)

    def _errors(self) -> dict[str, dict[str, Tensor]]:
        """Return by kind and name what messages have lost."""
        parts = zip(self.lossy, self.anchor, strict=bool(self.lossy))
        errors = [lossy.errors(part.numel()) for lossy, part in parts]
        kinds = errors[0] if errors else {}
        return {kind: self._by_name([section[kind] for section in errors]) for kind in kinds}

    def _slices(self, flat: Sequence[Tensor]) -> list[Tensor]:
        return [self.site.slice(part) for part in flat]

    def _pack(
        self,
        flat: Sequence[Tensor],
        views: Mapping[str, Tensor],
        values: Mapping[str, Tensor] | None = None,
        weight: float = 1.0,
    ) -> None:
        """Copy the parameters or weighted ``values``, with what rounding took from this slice."""
        values = self.site.parameters if values is None else values
        pack(views.values(), [values[name] for name in views])
        for part, carry in zip(self._slices(flat), self.carry, strict=bool(self.carry)):
            part.add_(carry, alpha=weight)

    def _blend(self, flat: Sequence[Tensor], anchors: Sequence[Tensor], mixing: float) -> None:
        for x, anchor in zip(self._slices(flat), anchors, strict=True):
            blend(anchor, x, mixing)

    def _write(self) -> None:
        """Set the parameters to the flat tensors, and note what rounding takes."""
        pack(self.site.parameters.values(), self.views.values())
        if self.carry:
            pack(self.carry, self._slices(self.flat))
            pack(self.views.values(), self.site.parameters.values())
            for carry, rounded in zip(self.carry, self._slices(self.flat), strict=True):
                carry.sub_(rounded)

    def _fault_of_mean(self) -> ValueError | None:
        """Return the same error on all ranks if the mean is not finite."""
        found = [-1.0]  # equal on all nodes, but each rank of a node has its own slice, or shard
        if self.site.group is not None:
            start = self.site.inside.rank if self.site.inside is not None else 0
            for section, part in enumerate(self._slices(self.flat)):
                if not part.sum(dtype=torch.float64).isfinite() and not part.isfinite().all():
                    first = start * part.numel() + int((~part.isfinite()).nonzero()[0])
                    found = [float(self.layout.segments(section, first, first + 1)[0].layer)]
        node = self.site.inside or self.site.shards
        found = [layer for (layer,) in gather_numbers(found, node)]
        if max(found) < 0:
            return None
        return ValueError(
            f"the mean of parameter {list(self.views)[int(max(found))]!r} is not finite: a rank "
            "has diverged; go back to a checkpoint and lower the learning rate, or clip gradients"
        )

    def _by_name(self, slices: Sequence[Tensor]) -> dict[str, Tensor]:
        return by_name(self.site, self.layout, slices)

    def _fill(self, slices: Sequence[Tensor], saved: Mapping[str, Tensor]) -> None:
        pack(slices, slices_of(self.site, self.layout, saved))


def _wide(parameter: Tensor) -> Tensor:
    """Return a tensor of the parameter's shape and strides in the dtype of sums, without memory."""
    dtype = accumulation_dtype(parameter.dtype)
    return torch.empty_like(parameter, dtype=dtype, device="meta")


def _lossy_means(
    wire: Wire, anchor: Sequence[Tensor], layout: Layout, site: Site
) -> Sequence[LossyMean]:
    """Return what averages the slices of ``anchor`` in short messages; none without a group."""
    group = site.group
    if group is None:
        return []
    if not isinstance(wire, Sparse):
        return [NarrowMean.of(part, wire, group) for part in anchor]
    first = site.inside.rank if site.inside is not None else 0
    found = []
    for section, part in enumerate(anchor):
        start = first * part.numel()
        segments = layout.segments(section, start, start + part.numel())
        found.append(SparseMean.of(part, wire, segments, group))
    return found
