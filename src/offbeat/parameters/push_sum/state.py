"""The state of push-sum on one replica, and what reads and writes its parameters."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from torch import Tensor

from offbeat.exchange import Site
from offbeat.functional import Layout, flat_view, pack
from offbeat.kernels.pieces import PushSumPasses
from offbeat.parameters.nonfinite import Guard
from offbeat.parameters.push_sum.gossip import GossipRound

_PROMPT = 1e-3  # seconds: a shorter wait means that the message had arrived already


@dataclass(eq=False)
class PushSumState:
    """State of :class:`~offbeat.parameters.PushSum` on one replica.

    ``anchor`` is the model z before the optimizer step, flat by section and not rounded to 16 bits;
    None where every weight stays 1 and nothing is rounded. ``rounds`` hold the buffers of an
    exchange: two alternate under overlap, since the next message is written while the last one is
    in flight (``pending``). ``flat`` is a copy of the parameters where they cannot be used in
    place: between nodes, on another device, with gaps in memory. ``prompt``: the last message had
    arrived when it was needed.
    """

    site: Site
    layout: Layout
    flat: list[Tensor] | None
    anchor: list[Tensor] | None
    rounds: list[GossipRound]
    passes: PushSumPasses
    guard: Guard
    weight: float = 1.0
    pending: GossipRound | None = None
    prompt: bool = False

    def copy_in(self) -> None:
        """Copy the parameters to ``flat``, if they cannot be used in place."""
        if self.flat is not None:
            views = self.layout.views(self.flat)
            pack(views.values(), self.site.parameters.values())

    def set_anchor(self) -> None:
        """Set the anchor, if there is one, to the parameters as :meth:`pieces` has them."""
        anchor = self.anchor or []
        for z, section, part in self.pieces() if anchor else ():
            anchor[section][part].copy_(z)

    def fill_messages(self, current: GossipRound) -> None:
        """Fix the content of the messages, before anything is added.

        All ranks raise the same error if the parameters of this one are not finite.
        """
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


def new_anchor(site: Site, layout: Layout) -> list[Tensor]:
    """Return zeros for an anchor, flat by section, in the dtype of sums."""
    return [site.slice(part).clone() for part in layout.wide(site.device, site.chunks)]


def works_in_place(site: Site) -> bool:
    """Return whether messages can be computed from the parameters where they are in memory."""
    parameters = site.parameters.values()
    return site.inside is None and all(
        p.device == site.device and flat_view(p) is not None for p in parameters
    )
