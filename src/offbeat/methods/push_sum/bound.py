"""Push-sum on one replica: its state, and what reads and writes its parameters."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import NoReturn

import torch
from torch import Tensor

from offbeat.exchange import (
    BoundParameters,
    Saved,
    Site,
    State,
    Variable,
    empty_slices,
    plain,
    scratch,
    sections,
    slices_of,
)
from offbeat.exchange.guard import Guard
from offbeat.functional import (
    Layout,
    add_update,
    debias,
    fill_and_add,
    flat_view,
    numerator,
    pack,
)
from offbeat.kernels.pieces import PushSumPasses
from offbeat.liveness.failure import PeerLost
from offbeat.methods.push_sum.gossip import GossipRound
from offbeat.methods.push_sum.samples import entering, is_updated
from offbeat.topology.graph import Topology
from offbeat.topology.schedule import due

_PROMPT = 1e-3  # seconds: a shorter wait means that the message had arrived already


@dataclass(eq=False)
class BoundPushSum(BoundParameters):
    """:class:`~offbeat.methods.PushSum` on one replica; flat tensors are by section."""

    site: Site
    layout: Layout
    flat: list[Tensor] | None  # a copy of parameters that cannot be used in place
    # The model z before the optimizer step, not rounded to 16 bits; None where every weight stays 1
    # and nothing is rounded.
    anchor: list[Tensor] | None
    rounds: list[GossipRound]  # under overlap two: one is written while the last is in flight
    passes: PushSumPasses
    guard: Guard
    topology: Topology
    overlap: int
    every: int  # steps between two exchanges
    biased: bool
    weighted_updates: bool
    weight: float = 1.0
    mass_given: float = 1.0  # by how much of the samples of a step the weights have grown
    pending: GossipRound | None = None  # in flight
    prompt: bool = False  # whether the last message had arrived when it was needed

    def state(self) -> Iterator[Variable]:
        """Yield the weight, the anchor and the mass in flight."""
        yield scratch("flat", self.flat or [])
        yield scratch("messages", [part for round in self.rounds for part in round.buffers])
        yield plain("own", self, "weight", _fault_of_weight)
        if self.site.weights is not None:
            yield plain("own", self, "mass_given", _fault_of_mass)
        if self.anchor is not None:
            if self.layout.is_rounded:  # elsewhere it equals the parameters
                yield sections("own", "anchor", self.anchor, self.site, self.layout)
            else:
                yield scratch("anchor", self.anchor)
        if self.overlap:
            yield Variable("pending", "in_flight", self._read_pending, self._write_pending)
            given = self._read_pending_weight, self._write_pending_weight, _fault_of_mass
            yield Variable("pending_weight", "in_flight", *given)
        yield from self.guard.state()

    def step(self, step: int) -> None:
        """Exchange with the peers of this step, if it is a sending step."""
        site, every = self.site, self.every
        sends = step % every == 0 if self.overlap else due(step, every)
        # The passes look at what they read: not at slices of other ranks, nor before a skip.
        if self.guard.kept is not None or site.group is None or site.inside is not None:
            self.guard.check(sends)
        self.copy_in()
        own: list[Tensor] = []
        if site.weights is not None and site.is_elastic and self.flat is None:
            own = [z.clone() for z, *_ in self.pieces()]
        self._enter()
        if site.group is not None:
            if sends:
                try:
                    self._exchange(step // every)
                except PeerLost:  # the others go on from what each has, without this exchange
                    for (z, *_), kept in zip(self.pieces(), own, strict=False):
                        z.copy_(kept)
                    raise
            elif self.anchor is not None:
                for z, section, part in self.pieces():
                    debias(z, self.anchor[section][part], self.weight)
        if self.flat is not None:
            site.gather(self.flat)
            pack(site.parameters.values(), self.layout.views(self.flat).values())
        self.guard.keep()

    def _enter(self) -> None:
        r"""Let the update count by its samples, and the weights of all add up to all samples.

        .. math:: w \leftarrow w + (s - m), \quad m \leftarrow s, \quad x = w a + s (z - a)

        :math:`\sum x / \sum w` moves by :math:`\sum s_i (z_i - a_i) / \sum s_i`: mass enters at
        the anchor a. Under weighted updates :math:`x = w z`. Then z = a = x / w, without what
        rounding takes.
        """
        grown, share = self._entering()
        self.weight, self.mass_given = self.weight + grown, self.mass_given + grown
        if share is None or self.anchor is None:
            return
        for z, section, part in self.pieces():
            z.copy_(add_update(self.anchor[section][part], z, share))

    def _entering(self) -> tuple[float, float | None]:
        return entering(self.site, self.weight, self.mass_given, self.weighted_updates)

    def measures(self) -> dict[str, float]:
        """Return the weight w, by which the model is divided, and with "skip" skipped steps."""
        return {"weight": float(self.weight), **self.guard.measures()}

    def _exchange(self, index: int) -> None:
        # One message in flight at a time: launching the next one before the last has arrived
        # costs a quarter of the line rate. The content of the next message is fixed before the
        # wait, so the method is the same.
        current, last = self.rounds[index % len(self.rounds)], self.pending
        current.begin(self.topology, index, self.weight)
        if not self.overlap:
            self.fill_messages(current)
            current.launch()
            current.wait()
            self.add_messages(current, current)
        elif last is not None and self.prompt:
            self.wait_for(last)
            self.fill_and_add(current, last)
            current.launch()
        else:
            # The network is the bottleneck: keep it busy while received messages are added.
            self.fill_messages(current)
            if last is not None:
                self.wait_for(last)
            current.launch()
            self.add_messages(current, last)
        self.pending = current if self.overlap else None

    def mass(self) -> tuple[list[Tensor], dict[str, Tensor], float]:
        """Return the numerator of the parameters and the weight, with mass in flight."""
        site = self.site
        self.guard.require()
        flat = self.layout.wide(site.device, site.chunks)
        views = self.layout.views(flat)
        pack(views.values(), site.parameters.values())
        parts, dtypes = [*map(site.slice, flat)], self.layout.dtypes
        zs = [part.to(dtype) for part, dtype in zip(parts, dtypes, strict=True)]
        grown, share = 0.0, None
        if site.weights is None or is_updated(site, zip(zs, self.anchor or [], strict=False)):
            grown, share = self._entering()
        before = self.weight + grown
        weight = before + self._read_pending_weight()
        if site.group is not None:
            for section, (z, part) in enumerate(zip(zs, parts, strict=True)):
                anchor = self.anchor[section] if self.anchor else None
                if share is None or anchor is None:
                    x = numerator(z, anchor, before)
                else:  # what the optimizer has done since the last exchange counts as in step()
                    x = add_update(anchor.clone(), z, share).mul_(before)
                for message in self.pending.arrived(section) if self.pending else ():
                    x = x + message
                part.copy_(x)
        return flat, views, weight

    def reset(self) -> None:
        """Start anew from equal replicas: anchor = parameters, w = 1, nothing in flight."""
        if self.pending is not None:
            self.pending.wait()  # a handle dropped unwaited breaks the group's next exchanges
        self.weight, self.mass_given, self.pending = 1.0, 1.0, None
        self.copy_in()
        self.set_anchor()
        self.guard.keep()

    def restart(self, weight: float) -> None:
        """Start anew from the parameters as they are, with ``weight``; those of others may vary."""
        if self.anchor is None and not self.biased:
            self.anchor = empty_slices(self.site, self.layout)
        self.reset()
        self.weight = self.mass_given = weight

    def take(self, earlier: State) -> None:
        """Start anew from the models as they are; mass in flight to or from a lost rank is lost."""
        self.restart(1.0)
        assert isinstance(earlier, BoundPushSum), "an exchange of the same kind"
        self.guard.take(earlier.guard)

    def unsent(self) -> list[Tensor]:
        """Return numerators and weight."""
        flat, _, weight = self.mass()
        return [*flat, flat[0].new_tensor([weight], dtype=torch.float64)]

    def add_unsent(self, shares: Sequence[Tensor]) -> None:
        """Add to numerator and weight, and de-bias."""
        flat, views, before = self.mass()
        *parts, weight = shares
        total = before + float(weight)
        for part, share in zip(flat, parts, strict=True):
            part.add_(share).div_(total)
        pack(self.site.parameters.values(), views.values())
        self.restart(total)

    def drain(self) -> float:
        """Add the message in flight before its time, de-bias, and return the weight."""
        # Each message is added once, at its receiver: it does not matter when the others do so.
        last, self.pending = self.pending, None
        if last is not None:
            last.wait()  # a loss found here leaves the parameters as they are
        self.copy_in()
        self._enter()  # what the optimizer has done since the last exchange
        before, self.weight = self.weight, self.weight + (last.weight_arrived if last else 0.0)
        for z, section, part in self.pieces() if self.anchor or last else ():
            a = self.anchor[section][part] if self.anchor else None
            fill_and_add(z, a, before, self.weight, [], last.arrived(section, part) if last else [])
        if self.flat is not None:
            pack(self.site.parameters.values(), self.layout.views(self.flat).values())
        return self.weight

    def staleness(self, step: int) -> int:
        """Return the age of the last received message: tau, plus the steps since it was added."""
        if self.overlap:
            return self.overlap + (step - 1) % self.overlap
        return step % self.every

    def load(self, saved: Saved) -> None:
        """Restore the weight and the mass in flight."""
        if self.site.is_elastic:  # after a join weights may vary on any graph
            self.restart(1.0)
        super().load(saved)

    def _read_pending(self) -> dict[str, Tensor]:
        flat = self.layout.wide("cpu", self.site.chunks)
        if self.pending is not None:
            self.pending.wait()
            for section, part in enumerate(self.site.slice(f) for f in flat):
                part.copy_(self.pending.total(section))
        return self.layout.views(flat)

    def _write_pending(self, named: dict[str, Tensor]) -> None:
        if (group := self.site.group) is not None:
            parts = slices_of(self.site, self.layout, named)
            self.pending = GossipRound(group, [], [parts])  # whose one message has arrived

    def _read_pending_weight(self) -> float:
        if self.pending is None:
            return 0.0
        self.pending.wait()
        return float(self.pending.weight_arrived)  # an int where nobody sends to this participant

    def _write_pending_weight(self, weight: float) -> None:
        if self.pending is not None:
            header = torch.tensor([weight, 0.0], dtype=torch.float64, device="cpu")
            self.pending.headers = [header]

    def copy_in(self) -> None:
        """Copy the parameters to ``flat``, if they cannot be used in place."""
        if self.flat is not None:
            pack(self.layout.views(self.flat).values(), self.site.parameters.values())

    def set_anchor(self) -> None:
        """Set the anchor, if there is one, to the parameters as :meth:`pieces` has them."""
        anchor = self.anchor or []
        for z, section, part in self.pieces() if anchor else ():
            anchor[section][part].copy_(z)

    def fill_messages(self, current: GossipRound) -> None:
        """Fix the content of the messages, before anything is added."""
        for section, zs, anchor in self.sections():
            if not self.passes.fill_messages(zs, anchor, self.weight, current.messages(section)):
                self.refuse()

    def add_messages(self, current: GossipRound, last: GossipRound | None) -> None:
        """Add the received messages of ``last`` to what remains after those of ``current``."""
        self.weight = current.weight_kept + (last.weight_arrived if last else 0.0)
        for section, zs, anchor in self.sections():
            arrived = last.arrived(section) if last else []
            self.passes.add_messages(zs, anchor, self.weight, current.messages(section), arrived)

    def fill_and_add(self, current: GossipRound, last: GossipRound) -> None:
        """Do both in one pass over memory, with the messages of ``last`` that have arrived."""
        before, self.weight = self.weight, current.weight_kept + last.weight_arrived
        for section, zs, anchor in self.sections():
            sent, arrived = current.messages(section), last.arrived(section)
            if not self.passes.fill_and_add(zs, anchor, before, self.weight, sent, arrived):
                self.refuse()

    def refuse(self) -> NoReturn:
        """Raise the error of a parameter that is not finite, on all ranks."""
        self.guard.require()
        raise AssertionError("a pass found a number that is not finite, which no parameter has")

    def wait_for(self, last: GossipRound) -> None:
        """Wait for the messages of ``last``, and note whether they had arrived."""
        started = time.perf_counter()
        last.wait()
        # On an accelerator a wait orders streams and returns at once: its duration means nothing.
        on_host = self.site.device.type == "cpu"
        self.prompt = on_host and time.perf_counter() - started < _PROMPT

    def sections(self) -> Iterator[tuple[int, list[Tensor], Tensor | None]]:
        """Yield each section, its flat pieces, one after the other in a message, and its anchor."""
        pieces: dict[int, list[Tensor]] = {}
        for z, section, _ in self.pieces():
            pieces.setdefault(section, []).append(z)
        for section, zs in pieces.items():
            yield section, zs, self.anchor[section] if self.anchor else None

    def pieces(self) -> Iterator[tuple[Tensor, int, slice]]:
        """Yield flat pieces of the parameters, each with its section and range in a message."""
        if self.flat is not None:
            for section, flat in enumerate(self.flat):
                yield self.site.slice(flat), section, slice(None)
            return
        for name, place in self.layout.places.items():
            z = flat_view(self.site.parameters[name])
            assert z is not None, "checked at attach, and strides do not change"
            yield z, place.section, slice(place.offset, place.offset + z.numel())


def _fault_of_weight(weight: float) -> str | None:
    return None if 0 < weight < inf else f"the weight is {weight}, expected a positive number"


def _fault_of_mass(mass: float) -> str | None:
    return None if 0 <= mass < inf else f"the mass is {mass}, expected 0 or more"
