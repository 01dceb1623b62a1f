"""The heartbeats that a rank reads: those of a few others, however many ranks there are.

Ranks form a ring. Each one watches the next few that live, so that every lost rank has a watcher:
the nearest living rank before it, also where a whole row is lost at once. It asks their beacons
too. Beside these, it reads the ranks that are named in the status record, and the next few of the
members it waits for.
"""

import time
from bisect import bisect
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Literal, NamedTuple, final

from offbeat.liveness.failure import Phase
from offbeat.liveness.heartbeats.beacon import Place
from offbeat.liveness.heartbeats.beat import Beat
from offbeat.liveness.heartbeats.crossed_waits import Elsewhere
from offbeat.liveness.heartbeats.probe import Probe
from offbeat.liveness.heartbeats.status_record import KEY, Silence, Status, StatusRecord
from offbeat.liveness.store.client import TimedStore

WATCHED = 3  # ranks that a rank watches


class Sign(NamedTuple):
    """Last heartbeat of a rank.

    Attributes:
        rank: the rank.
        phase: its phase.
        loss: why it counts as lost, "" if it does not.
        elsewhere: its wait in another replica, if it is in one.
    """

    rank: int
    phase: Phase
    loss: str = ""
    elsewhere: Elsewhere | None = None


class Patience(NamedTuple):
    """For how long a rank may be silent.

    Attributes:
        normal: seconds without a heartbeat until it is lost, if its beacon cannot be asked.
        after_failure: the same, once an exchange has failed.
        mute: seconds without an answer of its beacon, nor a heartbeat, until it is lost.
        beat: seconds between two heartbeats.
        stretch: the factor by which those of this rank are further apart at present.
    """

    normal: float
    after_failure: float
    mute: float
    beat: float
    stretch: float = 1.0


@final
class WatchRing:
    """Reads the heartbeats of other ranks; for one thread only.

    Silence is counted by a clock that runs while this rank looks. A rank that was suspended, or
    whose calls of the store take long, thus does not take its own pause for one of the others.

    Attributes:
        record: the status record.
        begun: the ranks that have written a heartbeat, ascending.
        gone: the ranks found to have left or lost.
        suspects: ranks to read beside the others, with the patience of a failure.
        ended: ranks whose process has ended before their first heartbeat in this ring.
    """

    def __init__(
        self,
        store: TimedStore,
        rank: int,
        ranks: Sequence[int],
        places: Mapping[int, Place] | None = None,
    ) -> None:
        """Announce ``rank``, which has written its first heartbeat, to the other ``ranks``.

        ``places``: beacons of some of these, of earlier heartbeats.
        """
        self.record = StatusRecord(store)
        self.begun: Sequence[int] = ()
        self.gone: dict[int, Literal["left", "lost"]] = {}
        self.suspects: Collection[int] = ()
        self.ended: Collection[int] = ()
        self._store, self._rank, self._ranks = store, rank, ranks
        self._seen: dict[int, tuple[str, Beat, float]] = {}  # last heartbeat, and when it was new
        self._probed: Collection[int] = ()
        self._probes: dict[int, Probe] = {}
        self._losses: dict[int, str] = {}
        self._clock, self._looked = 0.0, time.monotonic()
        self._has_failed, self._count = False, 0
        known, near = places or {}, self._next(sorted(ranks))
        self._expected = {r: Probe(known[r].of_process) for r in near if r in known}
        store.append("ranks", f"{rank} ")
        store.add("begun", 1)

    def probe(self, patience: Patience) -> bool:
        """Ask the beacons of the ranks watched; return whether one is newly found lost."""
        now = time.monotonic()
        self._clock += min(now - self._looked, 2 * patience.beat * patience.stretch)
        self._looked = now
        for rank in self._expected.keys() & self._seen.keys():
            self._expected.pop(rank).close()
        for probe in (*self._probes.values(), *self._expected.values()):
            probe.look(self._clock, patience.beat)
        return any(self._loss(rank, patience) for rank in self._probes.keys() - self.gone.keys())

    @property
    def places(self) -> dict[int, Place]:
        """The beacons of the ranks whose heartbeats it has read; from any thread."""
        beats = {rank: beat for rank, (_, beat, _) in self._seen.copy().items()}
        return {rank: beat.place for rank, beat in beats.items() if beat.place is not None}

    def close(self) -> None:
        """Close the connections to beacons."""
        for probe in [*self._probes.values(), *self._expected.values()]:
            probe.close()

    def look(self, members: Sequence[int], patience: Patience) -> tuple[Status, list[Sign]]:
        """Return the status record and the signs of some ranks, among them ``members`` to wait for.

        One call of the store, once all ranks have begun, for at most 10 keys and the suspects.
        After :meth:`probe`: a rank that leaves says so before its beacon goes out.
        """
        watched = self._watched(members)
        found = self._store.multi_get([KEY, *(f"rank{rank}" for rank in watched)])
        self.record.text, *beats = (value.decode() for value in found)
        status = self.record.status
        # After an agreed error no failure is written any more, and survivors name suspects.
        if (status.failure is not None or self.suspects) and not self._has_failed:
            self._has_failed = True  # less patience from now on, but not for the time before
            for rank in self._seen.keys() - self.gone.keys():
                self._seen[rank] = *self._seen[rank][:2], self._clock
        pairs = dict(zip(watched, beats, strict=True))
        signs = [self._sign(*pair, patience, status.silent) for pair in pairs.items()]
        for rank in self._probes.keys() - {*self._probed}:
            # The probe of a lost rank is the only one that its beacon has ever answered.
            if self.gone.get(rank) != "lost":
                self._probes.pop(rank).close()
        self._report(status.silent, pairs)
        return status, signs

    def _sign(self, rank: int, text: str, patience: Patience, reported: Silence | None) -> Sign:
        if rank not in self._seen or self._seen[rank][0] != text:
            self._seen[rank] = text, Beat.parse(text), self._clock
        beat = self._seen[rank][1]
        self._keep_probe(rank, beat.place, patience.beat)
        loss = self._loss(rank, patience)
        if reported is not None and reported[:2] == (rank, text):
            loss = loss or reported.loss
        if beat.phase.verb == "left":
            self.gone[rank] = "left"
        elif loss:
            self.gone[rank], self._losses[rank] = "lost", loss
        else:
            self.gone.pop(rank, None)
        return Sign(rank, beat.phase, loss, beat.elsewhere)

    def _loss(self, rank: int, patience: Patience) -> str:
        """Return why ``rank`` counts as lost, "" if it does not.

        No heartbeats are not enough where its beacon can be asked: a call that holds Python's lock
        stops them. Nor is no answer: the way to its beacon may be cut, and that to the store not.
        """
        _, beat, since = self._seen[rank]
        silence = self._clock - since
        stretch = max(beat.stretch, patience.stretch)
        probe = self._probes.get(rank)
        if probe is None or not probe.is_known:
            if probe is not None and probe.is_refused and self._has_failed:
                # Most likely it has ended soon after it began: it is given time for a heartbeat.
                return "its process has ended" if silence > 2 * patience.beat * stretch else ""
            limit = patience.after_failure if self._has_failed else patience.normal
            is_judged = probe is not None or beat.place is None  # others are, by their watchers
            is_lost = is_judged and silence > limit * stretch
            return f"no sign of life for {silence:.0f} s" if is_lost else ""
        if probe.has_ended:
            return "its process has ended"
        mute = 0.0 if probe.mute_since is None else min(silence, self._clock - probe.mute_since)
        return f"no answer for {mute:.0f} s" if mute > patience.mute * stretch else ""

    def _keep_probe(self, rank: int, place: Place | None, every: float) -> None:
        """Let the probe of ``rank`` be one of ``place``, if this rank is to ask it."""
        if (old := self._probes.get(rank)) is not None and old.place != place:
            self._probes.pop(rank).close()
        if place is not None and rank in self._probed and rank not in self._probes:
            self._probes[rank] = Probe(place)
            self._probes[rank].look(self._clock, every)

    def _report(self, reported: Silence | None, beats: Mapping[int, str]) -> None:
        """Tell all ranks of one that is lost, or that the one reported lives after all."""
        found: Silence | None = None
        if reported is None:
            rank = next((rank for rank, how in self.gone.items() if how == "lost"), None)
            if rank is None:
                return
            found = Silence(rank, self._seen[rank][0], self._losses[rank])
        elif beats.get(reported.rank, reported.beat) == reported.beat:
            return
        self.record.change(
            lambda old: old._replace(silent=found) if old.silent == reported else old
        )

    def _watched(self, members: Sequence[int]) -> list[int]:
        if len(self.begun) < len(self._ranks):
            self._look_who_has_begun()
            ended = {rank for rank, probe in self._expected.items() if probe.has_ended}
            # One may have begun, and left, since the list was read.
            self.ended = ended.difference(self.begun) if self._count == len(self.begun) else ()
        status = self.record.status
        named = (status.silent and status.silent.rank, status.left, status.front)
        begun = {*self.suspects}.intersection(self.begun) if self.suspects else ()
        self._probed = (*self._next(self.begun), *begun)
        found = (*self._probed, *self._next(sorted(members)), *named)
        return [rank for rank in dict.fromkeys(found) if rank not in (None, self._rank)]

    def _look_who_has_begun(self) -> None:
        """Read the list of them once it has doubled, is complete, or does not grow any more.

        If each of n ranks that start read it whenever one more has begun, that were n^3 numbers.
        """
        count, before, known = self._store.add("begun", 0), self._count, len(self.begun)
        self._count = count
        if count > known and (count >= min(2 * known, len(self._ranks)) or count == before):
            self.begun = sorted(map(int, self._store.get("ranks").split()))

    def _next(self, ring: Sequence[int]) -> Iterator[int]:
        """Yield the next ranks of ``ring`` after this one that live, as far as it is known."""
        start = bisect(ring, self._rank)
        after = (ring[(start + i) % len(ring)] for i in range(len(ring)))
        return islice((r for r in after if r not in self.gone and r != self._rank), WATCHED)
