"""Local SGD: the mean of all parameters every few steps."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Literal, final

from torch import Tensor

from offbeat.comm.collectives import chunk_of_mean, mean, peers_of_mean
from offbeat.exchange import ParameterExchange, Saved, Site
from offbeat.functional import Layout, pack
from offbeat.parameters.nonfinite import Guard, Nonfinite
from offbeat.schedule import due
from offbeat.settings import at_least, check_settings


@dataclass(eq=False)
class AverageState:
    """State of :class:`Average` on one replica.

    ``flat`` is a copy of the model by section, and ``views`` its tensors by name. ``carry`` is what
    rounding has taken from the means that this rank computes for all: its chunk of its slice of
    each section, empty for a section that is not rounded.
    """

    site: Site
    layout: Layout
    flat: list[Tensor]
    views: dict[str, Tensor]
    carry: list[Tensor]
    guard: Guard


@final
@dataclass(frozen=True, kw_only=True)
class Average(ParameterExchange[AverageState]):
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
    node). Extra memory: one model, two with "skip", and 4/n bytes for each 16-bit parameter. Passes
    over memory: four per exchange, with "skip" two in other steps.

    Source: Stich 2019, "Local SGD Converges Fast and Communicates Little", Algorithm 1.
    """

    every: Annotated[int, at_least(1, "steps")] = 1
    over: Literal["world", "node"] = "world"
    nonfinite: Nonfinite = "raise"

    def __post_init__(self) -> None:
        """Check the settings."""
        check_settings(self)

    def peers(self, site: Site) -> Collection[int] | None:
        """Return none, as a mean is a sum; any for 16-bit parameters."""
        return peers_of_mean(site.parameters.values())

    def init(self, site: Site) -> AverageState:
        """Allocate the flat copy of the model."""
        layout = Layout.of(site.parameters, site.slices)
        flat = layout.empty(site.device, site.chunks)
        carry = [part.float() for part in _rounded_chunks(site, layout, flat)]
        guard = Guard.of(site, self.nonfinite)
        return AverageState(site, layout, flat, layout.views(flat), carry, guard)

    def step(self, state: AverageState, step: int) -> None:
        """Average if (k+1) mod ``every`` is 0, where k is ``step``."""
        state.guard.check(due(step, self.every))
        if due(step, self.every):
            self._average(state)
        state.guard.keep()

    def _average(self, state: AverageState) -> None:
        site = state.site
        pack(state.views.values(), site.parameters.values())
        if site.group is not None:
            parts = zip(state.flat, state.carry, strict=True)
            for handle in [mean(site.slice(part), site.group, carry) for part, carry in parts]:
                handle.wait()
        site.gather(state.flat)
        pack(site.parameters.values(), state.views.values())

    def mass(self, state: AverageState) -> tuple[list[Tensor], dict[str, Tensor], float]:
        """Return the parameters, with what rounding took from their mean, and weight 1."""
        site = state.site
        state.guard.require()
        if not state.layout.is_rounded:
            pack(state.views.values(), site.parameters.values())
            return state.flat, state.views, 1.0
        flat = state.layout.wide(site.device, site.chunks)
        views = state.layout.views(flat)
        pack(views.values(), site.parameters.values())
        # Of the mean of n participants, but by one of them.
        for part, carry in zip(_rounded_chunks(site, state.layout, flat), state.carry, strict=True):
            part.add_(carry, alpha=site.size)
        return flat, views, 1.0

    def settle(self, state: AverageState) -> None:
        """Start anew from equal replicas: nothing is carried, and "skip" may return to them."""
        for carry in state.carry:
            carry.zero_()
        state.guard.keep()

    def staleness(self, state: AverageState, step: int) -> int:
        """Return the number of steps since the last average."""
        return step % self.every

    def save(self, state: AverageState) -> Saved:
        """Return the counts of skipped steps, and what rounding took from the means."""
        if not state.layout.is_rounded:
            return state.guard.save()
        site, flat = state.site, state.layout.wide("cpu", state.site.chunks)
        pack(_rounded_chunks(site, state.layout, flat), state.carry)
        return {"carry": state.layout.views(flat), **state.guard.save()}

    def unfit(self, state: AverageState, saved: Saved) -> str | None:
        """Return why the counts cannot be, or None."""
        return state.guard.unfit(saved)

    def load(self, state: AverageState, saved: Saved) -> None:
        """Restore the counts, and what rounding took from the means."""
        self.settle(state)
        state.guard.load(saved)
        if state.layout.is_rounded:
            site, flat = state.site, state.layout.wide("cpu", state.site.chunks)
            views = state.layout.views(flat)
            pack(views.values(), [saved["carry"][name] for name in views])
            pack(state.carry, _rounded_chunks(site, state.layout, flat))

    def measures(self, state: AverageState) -> dict[str, float]:
        """Return the number of steps that this rank has skipped, with "skip"."""
        return state.guard.measures()


def _rounded_chunks(site: Site, layout: Layout, flat: list[Tensor]) -> list[Tensor]:
    """Return of each section what this rank rounds for all: its chunk of its slice, or nothing."""
    slices = [site.slice(part) for part in flat]
    if (group := site.group) is None:
        return [part[:0] for part in slices]
    return [
        part[chunk_of_mean(part.numel(), group) if dtype.itemsize <= 2 else slice(0)]
        for part, dtype in zip(slices, layout.dtypes, strict=True)
    ]
