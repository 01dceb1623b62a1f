"""``diloco``, ``sparse_loco`` and ``local_sgd(outer=...)``: a mean that an optimizer steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np
import torch
from torch import Tensor

from offbeat.functional import Layout, accumulation_dtype, divide_layers
from offbeat.functional.messages.narrowing import GROUP, narrow_bytes
from offbeat.functional.messages.sparse_messages import SparseFormat, chunks_of
from offbeat.methods import OuterStep, Sparse
from offbeat.plan.clocks import Array, Clocks
from offbeat.plan.fabric import Fabric
from offbeat.plan.methods.slot import CALL, Section, StepTimes, gather_slices, slices_on
from offbeat.plan.profile import Profile
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
        sizes = {name: tensor.nbytes for name, tensor in profile.tensors.items()}
        sets = divide_layers(sizes, exchange.fragments)
        if not all(sets):
            layers = sum(1 for names in divide_layers(sizes, len(sizes)) if names)
            raise ValueError(
                f"fragments={exchange.fragments} for a model of {layers} layers: a fragment is a "
                f"set of whole layers; use fragments <= {layers}"
            )
        slices = slices_on(fabric, exchange)
        self.parts = [
            _part({name: profile.tensors[name] for name in names}, slices, exchange.wire)
            for names in sets
        ]
        extra = {"bf16": 2 + 1 / self.size, "int8": 1.5 + 1 / self.size}
        wire = 0.0 if exchange.wire is None else extra.get(str(exchange.wire), 1.0)
        self.memory = 4 * profile.numel * (1 + (1 + models_of(exchange.outer) + wire) / slices)
        for nbytes, entries in (each for part in self.parts for each in part.sparse):
            self.memory += self.size * float(nbytes.max()) + 16 * float(entries.max())

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
            ready = clocks.now
            if isinstance(wire, Sparse):
                clocks.spend(section.numel * (2 * speeds.add + speeds.select))
                arrival = clocks.all_gather(clocks.now, part.sparse[index][0], axis)
            elif wire is not None:
                clocks.spend(section.numel * (2 * speeds.add + speeds.narrow))
                share = -(-section.numel // (self.size * GROUP)) * GROUP
                nbytes = narrow_bytes(share, wire)
                arrival = clocks.staged(clocks.now, nbytes, axis, rounds=2)
            else:
                arrival = clocks.mean(ready, section.numel, section.itemsize, axis)
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


def _part(tensors: Mapping[str, Tensor], slices: int, wire: object) -> _Part:
    wide = {n: t.to(accumulation_dtype(t.dtype)) for n, t in tensors.items()}
    layout = Layout.of(wide, slices)
    held = [
        Section(numel // slices, dtype.itemsize)
        for numel, dtype in zip(layout.numels, layout.dtypes, strict=True)
    ]
    numel = sum(tensor.numel() for tensor in tensors.values())
    if not isinstance(wire, Sparse):
        return _Part(numel, held)
    forms = [
        [
            _sparse_format(layout, i, s * part.numel, (s + 1) * part.numel, wire)
            for s in range(slices)
        ]
        for i, part in enumerate(held)
    ]
    return _Part(numel, held, [(np.array(form)[:, 0], np.array(form)[:, 1]) for form in forms])


def _sparse_format(
    layout: Layout, section: int, start: int, stop: int, wire: Sparse
) -> tuple[int, int]:
    """Return the bytes and the entries of a message of ``flat[section][start:stop]``."""
    chunks = chunks_of(layout.segments(section, start, stop), wire.density)
    form = SparseFormat(chunks, wire.bits, layout.dtypes[section], torch.device("cpu"))
    return form.nbytes if chunks else 0, form.count
