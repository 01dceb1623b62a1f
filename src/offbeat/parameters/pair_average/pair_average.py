"""Asynchronous pair averaging: participants meet two by two while all go on training."""

from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from offbeat.exchange import ParameterExchange, Saved, Site
from offbeat.functional import Layout, accumulation_dtype, pack
from offbeat.parameters.pair_average.pairs import PairExchanger


@dataclass(eq=False)
class PairAverageState:
    """What :class:`PairAverage` knows of one replica.

    ``flat`` is the model as the last step left it, ``views`` the same by name. ``swaps`` is None
    on a rank that only receives, which happens between unequal nodes.
    """

    site: Site
    layout: Layout
    flat: list[Tensor]
    views: dict[str, Tensor]
    swaps: PairExchanger | None


@final
@dataclass(frozen=True)
class PairAverage(ParameterExchange[PairAverageState]):
    r"""AD-PSGD: a thread averages snapshots with a random partner; no step waits for anyone.

    .. math::
        \delta_i &\leftarrow \delta_i + (x_j - x_i)/2, \quad
        \delta_j \leftarrow \delta_j + (x_i - x_j)/2 \\
        z_i &\leftarrow z_i + \delta_i, \quad \delta_i \leftarrow 0 \quad \text{after each step}

    Here z are the parameters and x is a snapshot of z + δ. Participants with even numbers visit
    one with an odd number, drawn at random, at most once a step; those with odd numbers answer,
    however slow their own steps are, with what they had after the last. A step adds what has
    come since the one before. ``sum (z + δ)`` changes by the optimizers' updates alone, up to the
    rounding of δ: both sides of a pair compute the same difference, and what rounding takes from
    z stays in δ.

    ``finish()`` and ``consensus()`` let running exchanges end first; the next step starts anew.
    Call ``finish()`` before ``detach()``: a rank that just leaves is missed by its partners.

    A visit costs each side the model's bytes, sent and received at once (its slice between nodes,
    where ``over="node"``, and a gather inside the node in every step), and 8 more. Extra memory:
    four models, of which one is float32 for 16-bit parameters. Passes over memory: one a step,
    two more if something came; three for a visit, in the thread. Messages go from host memory
    through Gloo, since NCCL answers none that it does not expect.

    The clock decides who meets whom and when: runs cannot be repeated bit for bit, and a resumed
    run does not follow the one that was saved. A state that is saved while ranks exchange may
    hold one side of a pair's change and not the other, of which the mean keeps a trace; saved
    between ``consensus()`` and the next step it is exact.

    Raises ``ValueError`` where the process group has no Gloo for CPU tensors.

    Source: Lian et al. 2018, "Asynchronous Decentralized Parallel Stochastic Gradient Descent",
    Algorithm 1 and section 3 on deadlock. There partners average models that others may be
    changing; here snapshots, and what happened meanwhile is kept.

    >>> PairAverage(over="node")
    PairAverage(over='node')
    """

    over: Literal["world", "node"] = "world"

    def __post_init__(self) -> None:
        """Refuse settings that mean nothing."""
        if self.over not in ("world", "node"):
            raise ValueError(f"over={self.over!r}, expected 'world' or 'node'")

    def init(self, site: Site) -> PairAverageState:
        """Allocate the snapshots; nothing runs before the first step."""
        layout = Layout.of(site.parameters, site.slices)
        flat = layout.empty("cpu", site.chunks)
        group = site.group
        if group is not None and group.backend("cpu") != "gloo":
            raise ValueError(
                f"pair averaging needs Gloo for CPU tensors, got {group.backend('cpu')!r}; call "
                "torch.distributed.init_process_group('cpu:gloo,cuda:nccl')"
            )
        swaps = (
            PairExchanger.of([site.slice(f) for f in flat], group) if group is not None else None
        )
        return PairAverageState(site, layout, flat, layout.views(flat), swaps)

    def step(self, state: PairAverageState, step: int) -> None:
        """Add what has come, and publish the result for the exchanges to follow."""
        site, swaps, changed = state.site, state.swaps, state.site.inside is not None
        if swaps is not None:
            swaps.raise_error()
            with swaps.lock:
                pack(state.views.values(), site.parameters.values())
                changed |= swaps.absorb()
            swaps.go_on()
        if changed:  # into our own slice, which the thread may be reading, go the bytes it has
            site.gather(state.flat)
            pack(site.parameters.values(), state.views.values())

    def mass(self, state: PairAverageState) -> tuple[list[Tensor], dict[str, Tensor], float]:
        """The parameters with what has come and was not added yet; weight one."""
        site, swaps = state.site, state.swaps
        flat, views = _wide(state)
        pack(views.values(), site.parameters.values())
        if swaps is not None:
            swaps.quiesce()
            for part, delta in zip(flat, swaps.delta, strict=True):
                site.slice(part).add_(delta)
        return flat, views, 1.0

    def settle(self, state: PairAverageState) -> None:
        """Forget what was not added yet: it is in the average."""
        if state.swaps is not None:
            state.swaps.quiesce()
            state.swaps.clear()

    def staleness(self, state: PairAverageState, step: int) -> int:
        """Steps of this rank since its newest snapshot that met another was taken."""
        return state.swaps.staleness if state.swaps is not None else 0

    def save(self, state: PairAverageState) -> Saved:
        """What has come and was not added yet, and how partners will be drawn."""
        flat, views = _wide(state)
        if state.swaps is None:
            return {"delta": views, "random": torch.Generator().get_state()}
        with state.swaps.lock:
            for part, delta in zip(flat, state.swaps.delta, strict=True):
                state.site.slice(part).copy_(delta)
        return {"delta": views, "random": state.swaps.random.get_state()}

    def load(self, state: PairAverageState, saved: Saved) -> None:
        """Take over what had come; all ranks call."""
        self.settle(state)
        if state.swaps is None:
            return
        flat, views = _wide(state)
        pack(views.values(), [saved["delta"][name] for name in views])
        for part, delta in zip(flat, state.swaps.delta, strict=True):
            delta.copy_(state.site.slice(part))
        state.swaps.arrived = True
        state.swaps.random.set_state(saved["random"])


def _wide(state: PairAverageState) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Room for a model in which pairs add, flat and by name."""
    flat = [torch.zeros_like(part, dtype=accumulation_dtype(part.dtype)) for part in state.flat]
    return flat, state.layout.views(flat)
