"""Local SGD: the mean of all parameters every few steps."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, final

from torch import Tensor

from offbeat.exchange import (
    BoundParameters,
    ParameterExchange,
    Saved,
    Site,
    State,
    Variable,
    scratch,
)
from offbeat.exchange.guard import Guard, Nonfinite
from offbeat.exchange.interface import OnLoss
from offbeat.exchange.weights import Window
from offbeat.functional import Layout, pack
from offbeat.settings import at_least, check_settings
from offbeat.topology.schedule import due
from offbeat.transport.collectives import chunk_of_mean, mean, peers_of_mean


@final
@dataclass(frozen=True, kw_only=True)
class Average(ParameterExchange):
    r"""Average the parameters of all participants every ``every`` steps.

    .. math:: x_i \leftarrow \frac{1}{n} \sum_{j=1}^{n} x_j \quad \text{if } (k+1) \bmod every = 0

    for n participants after k earlier steps. They are the ranks, or with ``over="node"`` the
    nodes: then each local rank exchanges its own slice of the model, and the node gathers all
    slices.

    Parameters of a rank that are not finite when an average is due are the same error on all ranks.
    With ``nonfinite="skip"`` that rank returns to those after its step before, in any step, and
    goes on from them; a second time in a row is an error. What rounding takes from a mean of 16-bit
    parameters is added to the next one.

    Bytes sent per exchange: 2 (n-1)/n of the model's (of its slice, plus the gather inside the
    node). Extra memory: one model, two with "skip" or in an elastic run, and 4/n bytes for each
    16-bit parameter. Passes over memory: four per exchange, with "skip" two in other steps.

    Source: Stich 2019, "Local SGD Converges Fast and Communicates Little", Algorithm 1.
    """

    every: Annotated[int, at_least(1, "steps")] = 1
    over: Literal["world", "node"] = "world"
    nonfinite: Nonfinite = "raise"
    takes_weights: ClassVar[bool] = True
    on_loss: ClassVar[OnLoss] = "again"  # the mean

    def __post_init__(self) -> None:
        check_settings(self)

    def peers(self, site: Site) -> Collection[int] | None:
        """Return none, as a mean is a sum; any for 16-bit parameters."""
        return peers_of_mean(site.parameters.values())

    def bind(self, site: Site) -> "BoundAverage":
        """Allocate the flat copy of the model."""
        layout = Layout.of(site.parameters, site.slices)
        flat = layout.empty(site.device, site.chunks)
        carry = [part.float() for part in _rounded_chunks(site, layout, flat)]
        guard = Guard.of(site, self.nonfinite)
        is_plain = site.is_elastic and site.weights is None and site.inside is None
        is_kept = is_plain and self.nonfinite == "raise" and not layout.is_rounded
        kept = layout.empty(site.device, site.chunks) if is_kept else []
        views, window = layout.views(flat), Window(site)
        return BoundAverage(site, self, layout, flat, views, carry, guard, window, kept)


@dataclass(eq=False)
class BoundAverage(BoundParameters):
    """:class:`Average` on one replica."""

    site: Site
    settings: Average
    layout: Layout
    flat: list[Tensor]  # a copy of the model, by section
    views: dict[str, Tensor]  # its tensors by name
    # What rounding has taken from the means that this rank computes for all: its chunk of its slice
    # of each section, empty for a section that is not rounded.
    carry: list[Tensor]
    guard: Guard
    window: Window
    kept: list[Tensor]  # the last mean, if members that miss it after a loss can get it
    averaged: int = -1  # after how many steps, last

    def state(self) -> Iterator[Variable]:
        """Yield the copy of the model, what rounding took from the means, and skipped steps."""
        yield scratch("flat", [*self.flat, *self.kept])
        if self.layout.is_rounded:
            yield Variable("carry", "own", self._read_carry, self._write_carry, memory=self.carry)
        yield from self.guard.state()
        yield from self.window.state()

    def step(self, step: int) -> None:
        """Average if (k+1) mod ``every`` is 0, where k is ``step``."""
        is_due = due(step, self.settings.every)
        self.guard.check(is_due)
        if is_due:
            self._average()
            self.averaged = step + 1
        self.guard.keep()

    def _average(self) -> None:
        site = self.site
        self.window.weigh()
        pack(self.views.values(), site.parameters.values())
        carried = [carry.clone() for carry in self.carry]
        if site.group is not None:
            parts, group = zip(self.flat, carried, strict=True), site.group
            for handle in [mean(site.slice(p), group, c, site.shares) for p, c in parts]:
                handle.wait()
        site.gather(self.flat)
        site.commit()
        self.window.close()
        pack(self.carry, carried)
        pack(site.parameters.values(), self.views.values())
        if self.kept:
            self.kept, self.flat = self.flat, self.kept
            self.views = self.layout.views(self.flat)

    def mass(self) -> tuple[list[Tensor], dict[str, Tensor], float]:
        """Return the parameters, with what rounding took from their mean, and weight 1."""
        self.guard.require()
        if not self.layout.is_rounded:
            pack(self.views.values(), self.site.parameters.values())
            return self.flat, self.views, 1.0
        flat = self.layout.wide(self.site.device, self.site.chunks)
        views = self.layout.views(flat)
        pack(views.values(), self.site.parameters.values())
        # Of the mean of n participants, but by one of them.
        chunks = _rounded_chunks(self.site, self.layout, flat)
        for part, carry in zip(chunks, self.carry, strict=True):
            part.add_(carry, alpha=self.site.size)
        return flat, views, 1.0

    @property
    def result(self) -> dict[str, Tensor] | None:
        """The mean; not kept of 16-bit parameters, nor where a rank may return to its own."""
        return self.layout.views(self.kept) if self.kept else None

    def go_on_with(self, result: Mapping[str, Tensor], common: Saved) -> None:
        """Take over the mean, and keep it: this rank may be asked for it in its turn."""
        super().go_on_with(result, common)
        kept = self.layout.views(self.kept)
        pack(kept.values(), [result[name] for name in kept])

    def take(self, earlier: State) -> None:
        """Take over; another rank may still miss the last mean."""
        super().take(earlier)
        assert isinstance(earlier, BoundAverage), "an exchange of the same kind"
        pack(self.kept, earlier.kept)

    def windows(self) -> list[Window]:
        """Return the window since the last average, for each flat tensor."""
        return [self.window] * len(self.flat)

    def reset(self) -> None:
        """Start anew from equal replicas: nothing is carried, and "skip" may return to them."""
        for carry in self.carry:
            carry.zero_()
        self.averaged = -1
        self.window.close()
        self.guard.keep()

    def are_equal(self, steps: int) -> bool:
        """Return whether this is the step of an average."""
        return self.averaged == steps

    def staleness(self, step: int) -> int:
        """Return the number of steps since the last average."""
        return step % self.settings.every

    def measures(self) -> dict[str, float]:
        """Return the number of steps that this rank has skipped, with "skip"."""
        return self.guard.measures()

    def _read_carry(self) -> dict[str, Tensor]:
        flat = self.layout.wide("cpu", self.site.chunks)
        pack(_rounded_chunks(self.site, self.layout, flat), self.carry)
        return self.layout.views(flat)

    def _write_carry(self, named: dict[str, Tensor]) -> None:
        flat = self.layout.wide("cpu", self.site.chunks)
        views = self.layout.views(flat)
        pack(views.values(), [named[name] for name in views])
        pack(self.carry, _rounded_chunks(self.site, self.layout, flat))


def _rounded_chunks(site: Site, layout: Layout, flat: list[Tensor]) -> list[Tensor]:
    """Return of each section what this rank rounds for all: its chunk of its slice, or nothing."""
    slices = [site.slice(part) for part in flat]
    if (group := site.group) is None:
        return [part[:0] for part in slices]
    return [
        part[chunk_of_mean(part.numel(), group) if dtype.itemsize <= 2 else slice(0)]
        for part, dtype in zip(slices, layout.dtypes, strict=True)
    ]
