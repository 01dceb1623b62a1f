"""``diloco``, ``sparse_loco`` and ``local_sgd(outer=...)``: a mean that an optimizer steps."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np

from offbeat.functional.messages.narrowing import GROUP, narrow_bytes
from offbeat.methods import OuterStep, Sparse
from offbeat.methods.outer.fragment import Fragment
from offbeat.methods.outer.sparse_mean import SparseMean
from offbeat.plan.clocks import Array, Clocks
from offbeat.plan.fabric import Fabric
from offbeat.plan.methods.slot import CALL, Section, StepTimes, gather_slices, slices_on
from offbeat.plan.profile import Profile
from offbeat.plan.record import bound_in
from offbeat.settings import read_call
from offbeat.topology.schedule import due
from offbeat.transport.world import Axis


@dataclass(eq=False)
class _Part:
    """A fragment: its flat sections, the bytes of its sparse messages, its mean in flight."""

    numel: int
    held: Sequence[Section]
    sparse: Sequence[tuple[Array, Array]] = ()  # bytes and entries of each section, by slice
    arrivals: list[Array] = field(default_factory=list)


@final
class OuterStepTimes(StepTimes):
    r"""Models :class:`offbeat.methods.OuterStep`: a mean that travels for ``delay`` steps.

    .. math::
        f = \max_j t_j(k) + A(m), \qquad
        t_i(k + delay) \leftarrow \max(t_i, f)

    "bf16" and "int8" are two staged pairwise exchanges, and :class:`offbeat.methods.Sparse`
    one all-gather. Fragments take turns; where two are in flight, one follows the other.
    """

    def __init__(self, exchange: OuterStep, profile: Profile, fabric: Fabric) -> None:
        """Divide the model into fragments as the exchange does."""
        self.exchange, self.period, self.size = exchange, exchange.every, fabric.size(exchange.over)
        # Of sparse messages each local rank has its own size.
        count = slices_on(fabric, exchange) if isinstance(exchange.wire, Sparse) else 1
        first, *others = (bound_in(exchange, profile, fabric, rank) for rank in range(count))
        alike = zip(*(each.fragments for each in (first, *others)), strict=True)
        self.parts = [_part(fragments) for fragments in alike]
        anchors = sum(section.nbytes for part in self.parts for section in part.held)
        places = sum(16 * float(entries.max()) for p in self.parts for _, entries in p.sparse)
        self.memory = first.nbytes() + models_of(exchange.outer) * anchors + places

    def restart(self) -> None:
        """Begin with nothing in flight."""
        for part in self.parts:
            part.arrivals.clear()

    def step(self, clocks: Clocks, step: int) -> None:
        """Merge the means that are due, then send those whose turn it is."""
        delay = self.exchange.delay
        for turn, part in enumerate(self.parts):
            if part.arrivals and self._is_turn(step - delay, turn):
                self._merge(part, clocks)
            if self._is_turn(step, turn):
                self._send(part, clocks)
                if delay == 0:
                    self._merge(part, clocks)

    def _is_turn(self, step: int, turn: int) -> bool:
        every = self.exchange.every
        return due(step - turn * every // self.exchange.fragments, every)

    def _send(self, part: _Part, clocks: Clocks) -> None:
        wire, axis, speeds = self.exchange.wire, self.exchange.over, clocks.speeds
        clocks.spend(part.numel * speeds.copy)
        for index, section in enumerate(part.held):
            if isinstance(wire, Sparse):
                clocks.spend(section.numel * (2 * speeds.add + speeds.select))
                arrival = clocks.all_gather(clocks.now, part.sparse[index][0], axis)
            elif wire is not None:
                clocks.spend(section.numel * (2 * speeds.add + speeds.narrow))
                share = -(-section.numel // (self.size * GROUP)) * GROUP
                nbytes = narrow_bytes(share, wire)
                arrival = clocks.staged(clocks.now, nbytes, axis, rounds=2)
            else:
                arrival = clocks.mean(clocks.now, section.numel, section.itemsize, axis)
            part.arrivals.append(arrival)

    def _merge(self, part: _Part, clocks: Clocks) -> None:
        speeds, numel = clocks.speeds, sum(section.numel for section in part.held)
        for arrival in part.arrivals:
            clocks.wait(arrival)
        part.arrivals.clear()
        for _, entries in part.sparse:
            clocks.spend(self.size * float(entries.max()) * speeds.scatter)
        outer_step(clocks, numel, self.exchange.over)
        gather_slices(clocks, part.held, self.exchange.over)
        clocks.spend(part.numel * speeds.copy)


def outer_step(clocks: Clocks, numel: int, over: Axis) -> None:
    """Check and divide a mean, step the anchor and blend it: five passes over ``numel``."""
    if over == "node" and clocks.fabric.ranks_per_node > 1:  # whether any slice is not finite
        clocks.wait(clocks.all_gather(clocks.now, CALL, "local"))
    clocks.spend(5 * numel * clocks.speeds.add)


def models_of(outer: object) -> int:
    """Return how many models of state an outer optimizer has.

    >>> models_of("SGD(lr=1.0)"), models_of("SGD(lr=0.7, momentum=0.9)"), models_of("Adam(lr=0.1)")
    (0, 1, 2)
    """
    if not isinstance(outer, str):
        return 1
    name, _, settings = read_call(outer, "cannot read the outer optimizer", "'SGD(lr=0.7)'")
    return int(bool(settings.get("momentum"))) if name == "SGD" else 2


def _part(fragments: Sequence[Fragment]) -> _Part:
    """Return what one fragment is on each local rank."""
    own = fragments[0]
    numel = sum(parameter.numel() for parameter in own.site.parameters.values())
    held = [Section(anchor.numel(), anchor.itemsize) for anchor in own.anchor]
    forms = [[m.form for m in f.lossy if isinstance(m, SparseMean)] for f in fragments]
    sparse = [
        (np.array([f.nbytes * bool(f.chunks) for f in each]), np.array([f.count for f in each]))
        for each in zip(*forms, strict=True)
    ]
    return _Part(numel, held, sparse)
