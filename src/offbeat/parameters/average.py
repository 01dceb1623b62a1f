"""The mean of all parameters, every few steps."""

from dataclasses import dataclass
from typing import Literal, final

from torch import Tensor

from offbeat.comm.collectives import mean
from offbeat.exchange import ParameterExchange, Saved, Site
from offbeat.functional import Layout, pack
from offbeat.schedule import due


@dataclass(eq=False)
class AverageState:
    """What :class:`Average` knows of one replica: scratch memory alone."""

    site: Site
    flat: list[Tensor]
    views: dict[str, Tensor]


@final
@dataclass(frozen=True)
class Average(ParameterExchange[AverageState]):
    r"""Average the parameters of all participants every ``every`` steps.

    .. math:: x_i \leftarrow \frac{1}{n} \sum_{j=1}^{n} x_j \quad \text{if } (k+1) \bmod every = 0

    ``over="node"``: nodes are the participants, each local rank exchanges its slice. Bytes sent
    per exchange: 2 (n-1)/n of the model's (of its slice, plus a gather inside the node), nothing
    in between. Extra memory: one model. Passes over memory: three, every ``every`` steps.

    Source: Stich 2019, "Local SGD Converges Fast and Communicates Little", Algorithm 1.
    """

    every: int = 1
    over: Literal["world", "node"] = "world"

    def __post_init__(self) -> None:
        """Refuse settings that mean nothing."""
        if type(self.every) is not int or self.every < 1:
            raise ValueError(f"every={self.every!r}, expected a whole number of steps, 1 or more")
        if self.over not in ("world", "node"):
            raise ValueError(f"over={self.over!r}, expected 'world' or 'node'")

    def init(self, site: Site) -> AverageState:
        """Allocate the flat copy."""
        layout = Layout.of(site.parameters, site.slices)
        flat = layout.empty(site.device, site.chunks)
        return AverageState(site, flat, layout.views(flat))

    def step(self, state: AverageState, step: int) -> None:
        """Average if it is time."""
        if not due(step, self.every):
            return
        site = state.site
        pack(state.views.values(), site.parameters.values())
        if site.group is not None:
            for handle in [mean(site.slice(flat), site.group) for flat in state.flat]:
                handle.wait()
        site.gather(state.flat)
        pack(site.parameters.values(), state.views.values())

    def mass(self, state: AverageState) -> tuple[list[Tensor], dict[str, Tensor], float]:
        """The parameters as they are, with weight one."""
        pack(state.views.values(), state.site.parameters.values())
        return state.flat, state.views, 1.0

    def settle(self, state: AverageState) -> None:
        """Nothing to forget."""

    def staleness(self, state: AverageState, step: int) -> int:
        """Steps since the last average."""
        return step % self.every

    def save(self, state: AverageState) -> Saved:
        """Nothing: the schedule follows from the number of steps."""
        return {}

    def load(self, state: AverageState, saved: Saved) -> None:
        """Nothing to take over."""
