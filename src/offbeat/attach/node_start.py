"""The meeting of a node's ranks: those processes find each other that were started together.

After a crash the store still holds what their predecessors wrote, and each rank may be started
more than once before all of them run.
"""

import json
import time
import warnings
from collections.abc import Sequence

from offbeat.liveness.failure import PeerLost
from offbeat.liveness.heartbeats.roll_call import WARN_AFTER
from offbeat.liveness.store.client import TimedStore
from offbeat.platform.process_group import TIMEOUT

POLL = 0.5  # seconds between two looks at the store, at most


def meet(store: TimedStore, rank: int, ranks: Sequence[int]) -> int:
    """Return a number for this start of the node with these ``ranks``, equal on all of them."""
    # Every process has a number of its own. The first rank invites the latest process of each rank,
    # unless it has been at an earlier start; once all have accepted, it says so. An invitation is
    # made anew when a process that did not accept has a successor.
    place, since, warned = store.under(f"node {ranks[0]}"), time.monotonic(), False
    process = place.add("processes", 1)
    place.append("here", f"{rank}={process} ")
    spent = _spent(place)
    while (start := _look(place, rank, process, ranks, spent)) is None:
        waited = time.monotonic() - since
        if waited > TIMEOUT.total_seconds():
            raise PeerLost(
                f"rank {rank}: not all of the node's ranks {[*ranks]} have called replicate() "
                f"within {waited:.0f} s; start them together"
            )
        if waited > WARN_AFTER and not warned:
            warned = True
            warnings.warn(
                f"rank {rank}: not all of the node's ranks {[*ranks]} have called replicate() "
                f"after {waited:.0f} s; waiting for them",
                RuntimeWarning,
                stacklevel=2,
            )
        time.sleep(min(POLL, max(0.005, waited / 10)))
    return start


def _look(
    place: TimedStore, rank: int, process: int, ranks: Sequence[int], spent: Sequence[int]
) -> int | None:
    """Invite or accept; return the number of the start if all have accepted it."""
    start, invited = _invitation(place)
    if rank == ranks[0]:
        latest = _latest(place)
        if any(latest.get(other, spent[0]) in spent for other in ranks):
            return None
        processes = [latest[other] for other in ranks]
        if processes != invited:
            start = place.add("starts", 1)
            place.set("invitation", json.dumps([start, processes]))
    elif process not in invited:
        return None
    place.set(f"start {start}/{rank}", "accepts")
    if rank == ranks[0] and place.check([f"start {start}/{other}" for other in ranks]):
        place.set(f"start {start}/all", "accept")
    return start if place.check([f"start {start}/all"]) else None


def _invitation(place: TimedStore) -> tuple[int, list[int]]:
    start, processes = json.loads(place.find("invitation") or "[0, []]")
    return start, processes


def _latest(place: TimedStore) -> dict[int, int]:
    """Return the latest process of each rank that has come."""
    words = (place.find("here") or "").split()
    return {int(rank): int(process) for rank, process in (word.split("=") for word in words)}


def _spent(place: TimedStore) -> list[int]:
    """Return the processes of the last start that all had accepted; a number of none if none."""
    start, processes = _invitation(place)
    return [0, *processes] if place.check([f"start {start}/all"]) else [0]
