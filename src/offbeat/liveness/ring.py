"""The heartbeats that a rank reads: those of a few others, however many ranks there are.

Ranks form a ring. Each one watches the next few that live, so that every lost rank has a watcher:
the nearest living rank before it, also where a whole row is lost at once. Beside these, it reads
the ranks that are named in the status record, and the next few of the members it waits for.
"""

import json
import time
from bisect import bisect
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Literal, NamedTuple, final

from offbeat.liveness.crossed_waits import Elsewhere
from offbeat.liveness.failure import Phase
from offbeat.liveness.status_record import KEY, Silence, Status, StatusRecord
from offbeat.liveness.store import TimedStore

WATCHED = 3  # ranks that a rank watches


class Sign(NamedTuple):
    """Last heartbeat of a rank.

    Attributes:
        rank: the rank.
        phase: its phase.
        silence: for how many seconds it has not written another heartbeat.
        is_lost: whether that is too long.
        elsewhere: its wait in another replica, if it is in one.
    """

    rank: int
    phase: Phase
    silence: float
    is_lost: bool = False
    elsewhere: Elsewhere | None = None


class Patience(NamedTuple):
    """For how long a rank may be silent.

    Attributes:
        normal: seconds without a heartbeat until it is lost.
        after_failure: the same, once an exchange has failed.
        beat: seconds between two heartbeats.
        stretch: the factor by which those of this rank are further apart at present.
    """

    normal: float
    after_failure: float
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
        suspects: ranks to read beside the others.
    """

    def __init__(self, store: TimedStore, rank: int, ranks: Sequence[int]) -> None:
        """Announce ``rank``, which has written its first heartbeat, to the other ``ranks``."""
        self.record = StatusRecord(store)
        self.begun: Sequence[int] = ()
        self.gone: dict[int, Literal["left", "lost"]] = {}
        self.suspects: Collection[int] = ()
        self._store, self._rank, self._ranks = store, rank, ranks
        self._seen: dict[int, tuple[str, float]] = {}  # last heartbeat, and when it was new
        self._clock, self._looked = 0.0, time.monotonic()
        self._has_failed, self._count = False, 0
        store.append("ranks", f"{rank} ")
        store.add("begun", 1)

    def look(self, members: Sequence[int], patience: Patience) -> tuple[Status, list[Sign]]:
        """Return the status record and the signs of some ranks, among them ``members`` to wait for.

        One call of the store, once all ranks have begun, for at most 10 keys and the suspects.
        """
        now = time.monotonic()
        self._clock += min(now - self._looked, 2 * patience.beat * patience.stretch)
        self._looked = now
        watched = self._watched(members)
        found = self._store.multi_get([KEY, *(f"rank{rank}" for rank in watched)])
        self.record.text, *beats = (value.decode() for value in found)
        status = self.record.status
        if status.failure is not None and not self._has_failed:
            self._has_failed = True  # less patience from now on, but not for the time before
            for rank in self._seen.keys() - self.gone.keys():
                self._seen[rank] = self._seen[rank][0], self._clock
        limit = patience.after_failure if self._has_failed else patience.normal
        pairs = list(zip(watched, beats, strict=True))
        signs = [self._sign(*pair, limit, patience.stretch, status.silent) for pair in pairs]
        self._report(status.silent, dict(pairs))
        return status, signs

    def _sign(
        self, rank: int, beat: str, limit: float, own_stretch: float, reported: Silence | None
    ) -> Sign:
        if self._seen.get(rank, ("", 0.0))[0] != beat:
            self._seen[rank] = beat, self._clock
        _, stretch, elsewhere, *fields = json.loads(beat)
        phase, silence = Phase(*fields), self._clock - self._seen[rank][1]
        is_lost = silence > limit * max(stretch, own_stretch)
        if reported is not None and reported[:2] == (rank, beat):
            silence, is_lost = max(silence, reported.seconds), True
        if phase.verb == "left":
            self.gone[rank] = "left"
        elif is_lost:
            self.gone[rank] = "lost"
        else:
            self.gone.pop(rank, None)
        return Sign(rank, phase, silence, is_lost, elsewhere and Elsewhere(*elsewhere))

    def _report(self, reported: Silence | None, beats: Mapping[int, str]) -> None:
        """Tell all ranks of one that is lost, or that the one reported lives after all."""
        found: Silence | None = None
        if reported is None:
            rank = next((rank for rank, how in self.gone.items() if how == "lost"), None)
            if rank is None:
                return
            beat, since = self._seen[rank]
            found = Silence(rank, beat, self._clock - since)
        elif beats.get(reported.rank, reported.beat) == reported.beat:
            return
        self.record.change(
            lambda old: old._replace(silent=found) if old.silent == reported else old
        )

    def _watched(self, members: Sequence[int]) -> list[int]:
        if len(self.begun) < len(self._ranks):
            self._look_who_has_begun()
        status = self.record.status
        named = (status.silent and status.silent.rank, status.left, status.front)
        begun = {*self.suspects}.intersection(self.begun) if self.suspects else ()
        found = (*self._next(self.begun), *self._next(sorted(members)), *named, *begun)
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
