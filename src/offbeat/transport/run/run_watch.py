"""Whether a run goes on, as a rank that would join it sees it."""

import time
from dataclasses import dataclass, field
from typing import final

from offbeat.liveness.heartbeats import heartbeat
from offbeat.liveness.store.client import TimedStore
from offbeat.transport.run.membership import Membership

READ = 16  # members whose heartbeats tell whether a run goes on


@final
@dataclass(eq=False)
class RunWatch:
    """Tells whether a run goes on, by the heartbeats of some of its members."""

    store: TimedStore
    membership: Membership
    rank: int
    started: float = field(default_factory=time.monotonic)
    changed: float = field(default_factory=time.monotonic)
    is_rank_alive: bool = False  # another process has the number of this rank
    _beats: list[str | None] = field(default_factory=list)
    _own: str | None = None
    _looked: float = 0.0

    def is_over(self) -> bool:
        """Return whether all ranks have been silent for long; reads once per heartbeat."""
        now = time.monotonic()
        if now - self._looked > heartbeat.BEAT:
            self._looked = now
            self._look(now)
        return now - self.changed > 2 * heartbeat.SILENT_AFTER

    def _look(self, now: float) -> None:
        # Its keys are deleted at any time: after a change of its ranks, and after its end.
        store = self.store.under(f"{self.membership.name}/heartbeat")
        begun = store.find("ranks")
        if begun is None:
            return
        ranks = sorted(map(int, begun.split()))  # that have written a heartbeat
        beats = [store.find(f"rank{rank}") for rank in ranks[:: -(-len(ranks) // READ)]]
        if beats != self._beats:
            self._beats, self.changed = beats, now
        if self.rank in ranks:
            own = store.find(f"rank{self.rank}")
            is_late = now - self.started > heartbeat.BROKEN_AFTER
            self.is_rank_alive = is_late and None not in (self._own, own) and self._own != own
            self._own = own
