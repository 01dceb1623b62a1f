"""AD-PSGD: pairs of participants average while all of them continue training."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from offbeat.exchange import BoundParameters, ParameterExchange, Site, Variable, scratch
from offbeat.exchange.guard import Guard, Nonfinite
from offbeat.exchange.interface import OnLoss
from offbeat.functional import Layout, accumulation_dtype, pack
from offbeat.methods.pair_average.pairs import PairExchanger
from offbeat.settings import check_settings


@final
@dataclass(frozen=True, kw_only=True)
class PairAverage(ParameterExchange):
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
    the same error, each when it next waits for another one. ``nonfinite="skip"``: as in
    :class:`Average`.

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
    takes_weights: ClassVar[bool] = True  # of 0: no step could agree on others
    on_loss: ClassVar[OnLoss] = "anew"  # with the changes of exchanges that have ended

    def __post_init__(self) -> None:
        check_settings(self)

    def peers(self, site: Site) -> Collection[int] | None:
        """Return the participants of the other half: pairs are drawn at random."""
        return [peer for peer in range(site.size) if (peer - site.rank) % 2]

    def bind(self, site: Site) -> "BoundPairAverage":
        """Allocate the snapshots; exchanges start after the first step."""
        layout = Layout.of(site.parameters, site.slices)
        flat = layout.empty("cpu", site.chunks)
        group = site.group
        if group is not None and group.backend("cpu") != "gloo":
            raise ValueError(
                f"pair averaging needs Gloo for CPU tensors, got {group.backend('cpu')!r}; call "
                "torch.distributed.init_process_group('cpu:gloo,cuda:nccl')"
            )
        pairs = None if group is None else PairExchanger.of([site.slice(f) for f in flat], group)
        views = layout.views(flat)
        guard = Guard.of(site, self.nonfinite, kept=list(views.values()))
        guard.keep()
        return BoundPairAverage(site, layout, flat, views, pairs, guard)


@dataclass(eq=False)
class BoundPairAverage(BoundParameters):
    """:class:`PairAverage` on one replica."""

    site: Site
    layout: Layout
    flat: list[Tensor]  # the model after the last step, by section
    views: dict[str, Tensor]  # its tensors by name
    pairs: PairExchanger | None  # None on a rank that only receives, between unequal nodes
    guard: Guard

    def state(self) -> Iterator[Variable]:
        """Yield changes not added yet, and the state of the random draw of partners."""
        yield scratch("flat", self.flat)
        delta = self.pairs.memory if self.pairs is not None else []
        yield Variable("delta", "in_flight", self._read_delta, self._write_delta, memory=delta)
        yield Variable("random", "own", self._read_random, self._write_random, _fault_of_random)
        yield from self.guard.state()

    def step(self, step: int) -> None:
        """Add the changes of all exchanges, and publish the result for the next ones."""
        site, pairs, changed = self.site, self.pairs, self.site.inside is not None
        self.guard.check()
        if pairs is not None:
            pairs.raise_error()
            with pairs.lock:
                pack(self.views.values(), site.parameters.values())
                changed |= pairs.apply()
            pairs.start()
        if changed:  # the gather rewrites our own slice, which the thread may read, unchanged
            site.gather(self.flat)
            pack(site.parameters.values(), self.views.values())

    def mass(self) -> tuple[list[Tensor], dict[str, Tensor], float]:
        """Return the parameters with changes not added yet, and weight one."""
        self.guard.require()
        flat, views = self._wide()
        pack(views.values(), self.site.parameters.values())
        if self.pairs is not None:
            self.pairs.quiesce()
            for part, delta in zip(flat, self.pairs.delta, strict=True):
                self.site.slice(part).add_(delta)
        return flat, views, 1.0

    def drain(self) -> float:
        """End the exchanges of this step, and add their changes; all ranks call."""
        if self.pairs is not None:
            self.pairs.quiesce()
        self._add_changes()
        return 1.0

    def succeed(self, earlier: BoundParameters) -> None:
        """Take over, and add the changes of exchanges that have ended."""
        super().succeed(earlier)
        if isinstance(earlier, BoundPairAverage):
            earlier._add_changes()

    def _add_changes(self) -> None:
        """Add what exchanges have changed to the parameters."""
        if self.pairs is not None:
            with self.pairs.lock:
                pack(self.views.values(), self.site.parameters.values())
                if self.pairs.apply():
                    pack(self.site.parameters.values(), self.views.values())

    def reset(self) -> None:
        """Discard changes not added yet: the average contains them."""
        if self.pairs is not None:
            self.pairs.quiesce()
            self.pairs.clear()
        self.guard.keep()

    def staleness(self, step: int) -> int:
        """Return the number of own steps since the last exchanged snapshot was taken."""
        return self.pairs.staleness if self.pairs is not None else 0

    def measures(self) -> dict[str, float]:
        """Return the number of steps that this rank has skipped, with "skip"."""
        return self.guard.measures()

    def _wide(self) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Allocate a model in the dtype of sums, flat and by name."""
        flat = [torch.zeros_like(part, dtype=accumulation_dtype(part.dtype)) for part in self.flat]
        return flat, self.layout.views(flat)

    def _read_delta(self) -> dict[str, Tensor]:
        flat, views = self._wide()
        if self.pairs is not None:
            with self.pairs.lock:
                pack([self.site.slice(part) for part in flat], self.pairs.delta)
        return views

    def _write_delta(self, saved: dict[str, Tensor]) -> None:
        if self.pairs is not None:
            flat, views = self._wide()
            pack(views.values(), [saved[name] for name in views])
            pack(self.pairs.delta, [self.site.slice(part) for part in flat])
            self.pairs.arrived = True

    def _read_random(self) -> Tensor:
        if self.pairs is None:
            return torch.Generator().get_state()
        with self.pairs.lock:
            return self.pairs.random.get_state()

    def _write_random(self, saved: Tensor) -> None:
        if self.pairs is not None:
            self.pairs.random.set_state(saved.cpu())


def _fault_of_random(saved: Tensor) -> str | None:
    try:
        torch.Generator().set_state(saved.cpu())
    except (RuntimeError, TypeError) as error:
        return f"'random' is no state of a generator ({error})"
    return None
