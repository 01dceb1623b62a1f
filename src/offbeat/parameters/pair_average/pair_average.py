"""AD-PSGD: pairs of participants average while all of them continue training."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from offbeat.exchange import ParameterExchange, Saved, Site
from offbeat.functional import Layout, accumulation_dtype, pack
from offbeat.parameters.nonfinite import Guard, Nonfinite
from offbeat.parameters.pair_average.pairs import PairExchanger
from offbeat.settings import check_settings


@dataclass(eq=False)
class PairAverageState:
    """State of :class:`PairAverage` on one replica.

    ``flat`` is the model after the last step, by section, and ``views`` are its tensors by name.
    ``pairs`` is None on a rank that only receives, which happens between unequal nodes.
    """

    site: Site
    layout: Layout
    flat: list[Tensor]
    views: dict[str, Tensor]
    pairs: PairExchanger | None
    guard: Guard


@final
@dataclass(frozen=True, kw_only=True)
class PairAverage(ParameterExchange[PairAverageState]):
    r"""Average snapshots with a random partner in a thread; no step waits for another rank.

    .. math::
        \delta_i &\leftarrow \delta_i + (x_j - x_i)/2, \quad
        \delta_j \leftarrow \delta_j + (x_i - x_j)/2 \\
        z_i &\leftarrow z_i + \delta_i, \quad \delta_i \leftarrow 0 \quad \text{after each step}

    Here z are the parameters and x is a snapshot of z + δ. Participants with even numbers
    initiate an exchange with one with an odd number, drawn at random, at most once per step. The
    others respond with the model after their last step, however long the current one takes. A
    step adds the changes of all exchanges since the step before. ``sum (z + δ)`` changes by the
    optimizers' updates only, up to the rounding of δ: both sides of a pair compute the same
    difference, and the rounding error of z stays in δ.

    Parameters of a rank that are not finite after a step never enter a snapshot: all ranks raise
    the same error, each when it next waits for another one. With ``nonfinite="skip"`` that rank
    returns to those after its step before, and a second time in a row is an error.

    ``finish()`` and ``consensus()`` wait for running exchanges; the next step starts new ones.
    Call ``finish()`` before ``detach()``: to its partners, a rank that leaves is a lost rank.

    Bytes sent per exchange and side: the model's, received at the same time, and 8 more; with
    ``over="node"`` those of a slice, and a gather inside the node in every step. Extra memory:
    four models, one of them float32 for 16-bit parameters. Passes over memory: two per step, two
    more after an exchange; three per exchange in the thread. Messages are sent from host memory
    through Gloo, since NCCL cannot receive a message that it does not expect.

    Timing decides which participants exchange and when: runs cannot be repeated bit for bit, and
    a resumed run does not follow the one that was saved. A state that is saved while ranks
    exchange may contain one side of a pair's change without the other, which leaves an error in
    the mean; saved between ``consensus()`` and the next step it is exact.

    Raises ``ValueError`` where the process group has no Gloo for CPU tensors.

    Source: Lian et al. 2018, "Asynchronous Decentralized Parallel Stochastic Gradient Descent",
    Algorithm 1 and section 3 on deadlock. There partners average models that may change during
    the exchange; here they average snapshots, and changes made meanwhile are kept.

    >>> PairAverage(over="node")
    PairAverage(over='node', nonfinite='raise')
    """

    over: Literal["world", "node"] = "world"
    nonfinite: Nonfinite = "raise"
    waits: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Check the settings."""
        check_settings(self)

    def peers(self, site: Site) -> Collection[int] | None:
        """Return the participants of the other half: pairs are drawn at random."""
        return [peer for peer in range(site.size) if (peer - site.rank) % 2]

    def init(self, site: Site) -> PairAverageState:
        """Allocate the snapshots; exchanges start after the first step."""
        layout = Layout.of(site.parameters, site.slices)
        flat = layout.empty("cpu", site.chunks)
        group = site.group
        if group is not None and group.backend("cpu") != "gloo":
            raise ValueError(
                f"pair averaging needs Gloo for CPU tensors, got {group.backend('cpu')!r}; call "
                "torch.distributed.init_process_group('cpu:gloo,cuda:nccl')"
            )
        pairs = (
            PairExchanger.of([site.slice(f) for f in flat], group) if group is not None else None
        )
        views = layout.views(flat)
        guard = Guard.of(site, self.nonfinite, kept=list(views.values()))
        guard.keep()
        return PairAverageState(site, layout, flat, views, pairs, guard)

    def step(self, state: PairAverageState, step: int) -> None:
        """Add the changes of all exchanges, and publish the result for the next ones."""
        site, pairs, changed = state.site, state.pairs, state.site.inside is not None
        state.guard.check()
        if pairs is not None:
            pairs.raise_error()
            with pairs.lock:
                pack(state.views.values(), site.parameters.values())
                changed |= pairs.apply()
            pairs.start()
        if changed:  # the gather rewrites our own slice, which the thread may read, unchanged
            site.gather(state.flat)
            pack(site.parameters.values(), state.views.values())

    def mass(self, state: PairAverageState) -> tuple[list[Tensor], dict[str, Tensor], float]:
        """Return the parameters with changes not added yet, and weight one."""
        site, pairs = state.site, state.pairs
        state.guard.require()
        flat, views = _wide(state)
        pack(views.values(), site.parameters.values())
        if pairs is not None:
            pairs.quiesce()
            for part, delta in zip(flat, pairs.delta, strict=True):
                site.slice(part).add_(delta)
        return flat, views, 1.0

    def settle(self, state: PairAverageState) -> None:
        """Discard changes not added yet: the average contains them."""
        if state.pairs is not None:
            state.pairs.quiesce()
            state.pairs.clear()
        state.guard.keep()

    def staleness(self, state: PairAverageState, step: int) -> int:
        """Return the number of own steps since the last exchanged snapshot was taken."""
        return state.pairs.staleness if state.pairs is not None else 0

    def save(self, state: PairAverageState) -> Saved:
        """Return changes not added yet, and the state of the random draw of partners."""
        flat, views = _wide(state)
        if state.pairs is None:
            return {"delta": views, "random": torch.Generator().get_state(), **state.guard.save()}
        with state.pairs.lock:
            for part, delta in zip(flat, state.pairs.delta, strict=True):
                state.site.slice(part).copy_(delta)
        return {"delta": views, "random": state.pairs.random.get_state(), **state.guard.save()}

    def unfit(self, state: PairAverageState, saved: Saved) -> str | None:
        """Return why the state of the random draw is none, or the counts cannot be, or None."""
        try:
            torch.Generator().set_state(saved["random"].cpu())
        except (RuntimeError, TypeError) as error:
            return f"'random' is no state of a generator ({error})"
        return state.guard.unfit(saved)

    def measures(self, state: PairAverageState) -> dict[str, float]:
        """Return the number of steps that this rank has skipped, with "skip"."""
        return state.guard.measures()

    def load(self, state: PairAverageState, saved: Saved) -> None:
        """Restore changes not added yet; all ranks call."""
        self.settle(state)
        state.guard.load(saved)
        if state.pairs is None:
            return
        flat, views = _wide(state)
        pack(views.values(), [saved["delta"][name] for name in views])
        for part, delta in zip(flat, state.pairs.delta, strict=True):
            delta.copy_(state.site.slice(part))
        state.pairs.arrived = True
        state.pairs.random.set_state(saved["random"].cpu())


def _wide(state: PairAverageState) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Allocate a model in the dtype of sums, flat and by name."""
    flat = [torch.zeros_like(part, dtype=accumulation_dtype(part.dtype)) for part in state.flat]
    return flat, state.layout.views(flat)
