"""A rank that waits to join, as the members see it: whether its process still runs."""

import time
from collections.abc import Sequence
from typing import final

from offbeat.liveness.heartbeats import heartbeat
from offbeat.liveness.heartbeats.beat import Beat
from offbeat.liveness.heartbeats.probe import Probe
from offbeat.liveness.heartbeats.ring import WATCHED
from offbeat.liveness.heartbeats.status_record import JoinRequest
from offbeat.transport.links import Links
from offbeat.transport.run.membership import name_after

MEET = 0.25  # heartbeats within which a beacon answers that can be reached
POLL = 0.005  # seconds between two looks for the answer


@final
class Newcomer:
    """Looks at the heartbeat of a rank that has made a request, and asks its beacon.

    From then on, so that its end is noticed before the others wait for it, and at once after it has
    joined. For one thread. Only the members that will watch it ask; extra traffic: theirs for one
    rank more. One that is taken for gone by mistake tries again: it holds no model yet.
    """

    def __init__(self, links: Links, request: JoinRequest, rank: int) -> None:
        """Ask ``rank``, one of those of the ``request``, at the first look."""
        after = (r for r in links.world.ranks if r > rank)
        before = (r for r in links.world.ranks if r < rank)
        self._is_watched = links.world.rank in [*after, *before][-WATCHED:]
        name = name_after(links.name, links.change, request.number)
        self._store, self._key = links.store.under(f"{name}/heartbeat"), f"rank{rank}"
        self._text, self._since = "", 0.0
        self._probe: Probe | None = None

    @property
    def is_met(self) -> bool:
        """Whether this member notices its end, or need not."""
        return not self._is_watched or (self._probe is not None and self._probe.is_known)

    @property
    def is_mute(self) -> bool:
        """Whether its beacon was asked, and has not answered yet."""
        return self._is_watched and self._probe is not None and not self._probe.is_known

    def is_gone(self) -> bool:
        """Look once, and return whether its process has ended."""
        if not self._is_watched:
            return False
        now, text = time.monotonic(), self._store.find(self._key)
        if text is None:  # it has joined meanwhile, and its keys are deleted
            return False
        beat = Beat.parse(text)
        if text != self._text:
            self._text, self._since = text, now
        if beat.place is not None and self._probe is None:
            self._probe = Probe(beat.place)
        if (probe := self._probe) is None:
            return False
        probe.look(now, heartbeat.BEAT)
        is_silent = now - self._since > 2 * heartbeat.BEAT * beat.stretch
        return probe.has_ended or (probe.is_refused and is_silent)

    def close(self) -> None:
        """Ask no more."""
        self._is_watched = False
        if self._probe is not None:
            self._probe.close()


def meet(newcomers: Sequence[Newcomer]) -> None:
    """Wait a moment for the first answers of their beacons.

    Before it, the end of a process cannot be told from a wrong address: the others would wait for
    that rank until it counts as silent.
    """
    until = time.monotonic() + MEET * heartbeat.BEAT
    while not any(newcomer.is_gone() for newcomer in newcomers):
        if time.monotonic() > until or not any(newcomer.is_mute for newcomer in newcomers):
            return
        time.sleep(POLL)
