"""What one heartbeat says, and the writing of those of this rank."""

import contextlib
import json
import math
import sys
import time
from typing import NamedTuple, final

from offbeat.liveness.failure import Phase
from offbeat.liveness.heartbeats.beacon import Place, beacon
from offbeat.liveness.heartbeats.crossed_waits import Elsewhere
from offbeat.liveness.store.client import TimedStore


class Beat(NamedTuple):
    """A heartbeat, as it is in the store.

    Attributes:
        number: how many its rank has written, this one included.
        stretch: the factor by which those of its rank are further apart at present.
        phase: the phase of its rank.
        elsewhere: the wait of its rank in another replica, if it is in one.
        place: where a beacon answers for it, if one does.
    """

    number: int
    stretch: float
    phase: Phase
    elsewhere: Elsewhere | None = None
    place: Place | None = None

    @classmethod
    def parse(cls, text: str) -> "Beat":
        """Read JSON."""
        number, stretch, phase, elsewhere, place = json.loads(text)
        said = elsewhere and Elsewhere(*elsewhere), place and Place(*place)
        return cls(number, stretch, Phase(*phase), *said)


@final
class BeatWriter:
    """Writes the heartbeats of ``rank``, for which the beacon of this process answers."""

    def __init__(self, store: TimedStore, rank: int) -> None:
        """Write the first one."""
        self._store, self._key, self._count = store, f"rank{rank}", 0
        self._place = beacon.light(store.own_hosts)
        self.write(1.0, Phase(), None)
        self._written = -math.inf  # soon again, with a look at the others, to find their beacons

    def is_due(self, seconds: float) -> bool:
        """Return whether the last one was written ``seconds`` ago."""
        return time.monotonic() - self._written > seconds

    def write(self, stretch: float, phase: Phase, elsewhere: Elsewhere | None) -> None:
        """Write the next one."""
        self._count, self._written = self._count + 1, time.monotonic()
        beat = Beat(self._count, stretch, phase, elsewhere, self._place)
        self._store.set(self._key, json.dumps(beat))

    def end(self) -> None:
        """Count as lost from now on, unless the last one says that this rank has left."""
        if self._place is not None:
            beacon.put_out(self._place)

    def end_with_script(self, stretch: float, phase: Phase) -> None:
        """Count as lost after an error; else write a last one without a place.

        Then only silence counts, as that of a rank without a beacon: a script that has ended has
        sent all that the others need, but they may not have received it.
        """
        if hasattr(sys, "last_type"):
            self.end()
        elif self._place is not None:
            self._place = None
            with contextlib.suppress(RuntimeError):
                self.write(stretch, phase, None)
