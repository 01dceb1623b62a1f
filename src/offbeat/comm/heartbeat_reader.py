"""The reader of the heartbeats of other ranks."""

import json
import time
from typing import Literal, NamedTuple

from offbeat.comm.failure import Phase
from offbeat.comm.several_replicas import Elsewhere
from offbeat.comm.timed_store import TimedStore


class Sign(NamedTuple):
    """Last heartbeat of a rank: its phase, and for how many seconds it has been silent."""

    rank: int
    phase: Phase
    silence: float


class HeartbeatReader:
    """Reads the heartbeats of the other ranks from the store.

    Attributes:
        elsewhere: by rank, its wait in another replica, if it is in one.
    """

    def __init__(self, store: TimedStore, rank: int, ranks: tuple[int, ...]) -> None:
        self.elsewhere: dict[int, Elsewhere | None] = {}
        self._store = store
        self._others = [other for other in ranks if other != rank]
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._silent: dict[int, bytes] = {}  # the last heartbeat of those found silent
        self._searched = 0  # how many ranks had begun when they were last asked for one by one

    def begin(self) -> None:
        """Count this rank among those that have written a heartbeat."""
        self._store.add("begun", 1)

    def read(self, since: float) -> list[Sign]:
        """Return a sign of each rank that has begun; one call of the store, once all were read.

        Silence counts from ``since`` at the earliest, in seconds of ``time.monotonic()``.
        """
        now, others = time.monotonic(), self._begun()
        beats = self._store.multi_get([f"rank{rank}" for rank in others]) if others else []
        signs = []
        for rank, beat in zip(others, beats, strict=True):
            if self._seen.get(rank, (b"", 0.0))[0] != beat:
                self._seen[rank] = (beat, now)
            _, elsewhere, *fields = json.loads(beat)
            self.elsewhere[rank] = elsewhere and Elsewhere(*elsewhere)
            signs.append(Sign(rank, Phase(*fields), now - max(self._seen[rank][1], since)))
        return signs

    def note_silence(self, rank: int) -> None:
        """Note that ``rank`` counts as lost, until it writes another heartbeat."""
        self._silent[rank] = self._seen[rank][0]

    def gone(self, since: float, patience: float) -> dict[int, Literal["left", "lost"]]:
        """Return the ranks that have left (detach), or have been silent for ``patience`` seconds.

        Also those that were found silent before and have not written a heartbeat since, and those
        that have not written their first one.
        """
        found: dict[int, Literal["left", "lost"]] = {}
        for rank, phase, silence in self.read(since):
            if phase.verb == "left":
                found[rank] = "left"
            elif silence > patience or self._silent.get(rank) == self._seen[rank][0]:
                found[rank] = "lost"
        if time.monotonic() - since > patience:
            found |= dict.fromkeys({*self._others} - {*self._seen}, "lost")
        return found

    def _begun(self) -> list[int]:
        """Return the other ranks that have written a heartbeat: reading another's would block."""
        unseen = [rank for rank in self._others if rank not in self._seen]
        count = self._store.add("begun", 0) if unseen else len(self._others) + 1
        if count > len(self._others):
            return self._others
        # Asked one by one only if another one has come: a rank may be late by minutes, and the
        # store could not serve such a search of every waiting rank in every second.
        absent = set(unseen)
        if count != self._searched:
            absent = {rank for rank in unseen if not self._store.check([f"rank{rank}"])}
            self._searched = count
        return [rank for rank in self._others if rank not in absent]
