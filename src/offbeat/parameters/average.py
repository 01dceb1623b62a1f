"""Local SGD: the mean of all parameters every few steps."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Literal, final

from torch import Tensor

from offbeat.comm.collectives import mean, peers_of_mean
from offbeat.exchange import ParameterExchange, Saved, Site
from offbeat.functional import Layout, pack
from offbeat.parameters.nonfinite import Guard, Nonfinite
from offbeat.schedule import due
from offbeat.settings import at_least, check_settings


@dataclass(eq=False)
class AverageState:
    """The state of one replica: a flat copy of the model and its views by parameter name."""

    site: Site
    flat: list[Tensor]
    views: dict[str, Tensor]
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
    goes on from them; a second time in a row is an error.

    Bytes sent per exchange: 2 (n-1)/n of the model's (of its slice, plus the gather inside the
    node). Extra memory: one model, two with "skip". Passes over memory: four per
    exchange, with "skip" two in other steps.

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
        return AverageState(site, flat, layout.views(flat), Guard.of(site, self.nonfinite))

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
            for handle in [mean(site.slice(flat), site.group) for flat in state.flat]:
                handle.wait()
        site.gather(state.flat)
        pack(site.parameters.values(), state.views.values())

    def mass(self, state: AverageState) -> tuple[list[Tensor], dict[str, Tensor], float]:
        """Return the parameters with weight 1."""
        state.guard.require()
        pack(state.views.values(), state.site.parameters.values())
        return state.flat, state.views, 1.0

    def settle(self, state: AverageState) -> None:
        """Note the parameters: "skip" may return to them."""
        state.guard.keep()

    def staleness(self, state: AverageState, step: int) -> int:
        """Return the number of steps since the last average."""
        return step % self.every

    def save(self, state: AverageState) -> Saved:
        """Return the counts of skipped steps; the schedule follows from the number of steps."""
        return state.guard.save()

    def unfit(self, state: AverageState, saved: Saved) -> str | None:
        """Return why the counts cannot be, or None."""
        return state.guard.unfit(saved)

    def load(self, state: AverageState, saved: Saved) -> None:
        """Restore the counts."""
        state.guard.load(saved)

    def measures(self, state: AverageState) -> dict[str, float]:
        """Return the number of steps that this rank has skipped, with "skip"."""
        return state.guard.measures()
