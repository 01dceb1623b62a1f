"""Waits of several replicas in one process, which ranks may have entered in different orders."""

import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple

from offbeat.liveness.failure import SAME, Phase
from offbeat.liveness.heartbeats.calls import Calls


class Elsewhere(NamedTuple):
    """A wait of a rank in another replica than the one asked about; see :class:`Phase`."""

    replica: str
    calls: int
    verb: str
    exchanges: int
    members: list[int]  # ranks that it waits for


_all: "weakref.WeakSet[Calls]" = weakref.WeakSet()
_adding = threading.Lock()  # the ranks of a world of threads attach at the same time
_followers: list[Callable[[], None]] = []


def follow(changed: Callable[[], None]) -> None:
    """Call ``changed`` whenever a replica of this process begins or ends."""
    _followers.append(changed)


def add(heartbeat: Calls) -> None:
    """Remember ``heartbeat``, for the other replicas of its rank."""
    with _adding:
        _all.add(heartbeat)
    for changed in _followers:
        changed()


def remove(heartbeat: Calls) -> None:
    """Forget ``heartbeat``."""
    with _adding:
        _all.discard(heartbeat)
    for changed in _followers:
        changed()


def others_of(heartbeat: Calls) -> list[Calls]:
    """Return the heartbeats of the other replicas of this rank."""
    with _adding:
        return [h for h in _all if h.rank == heartbeat.rank and h is not heartbeat]


def ranks_here() -> dict[int, Phase]:
    """Return the ranks of this process, and the phase of each."""
    with _adding:
        return {heartbeat.rank: heartbeat.phase for heartbeat in _all}


def elsewhere(heartbeat: Calls) -> Elsewhere | None:
    """Return the wait of this rank in another replica, if there is one."""
    for other in others_of(heartbeat):
        if other.is_waiting:
            phase = other.phase
            place = phase.calls, phase.verb, phase.exchanges
            return Elsewhere(other.name, *place, [*other.members])
    return None


def report_crossed(
    heartbeat: Calls, rank: int, there: Phase, wait: Elsewhere | None
) -> Exception | None:
    """Report and return an error in the replica where ``rank`` waits for us, as we do for it here.

    We are in a call of this replica that the other rank has not entered, and it is in a call of
    another replica that we have not entered: ranks took the two in different orders.

    Args:
        heartbeat: that of this replica, in which we wait.
        rank: the other rank.
        there: its phase in this replica.
        wait: its wait in another replica.
    """
    here = heartbeat.phase
    if wait is None or heartbeat.rank not in wait.members or rank not in heartbeat.members:
        return None
    if not _lacks(there, here.calls, here.verb, here.exchanges):
        return None
    for other in others_of(heartbeat):
        if other.name == wait.replica and _lacks(other.phase, *wait[1:4]):
            waits = {
                rank: f"{wait.verb} (call {wait.calls}) of replica {wait.replica}",
                heartbeat.rank: f"{here.verb} (call {here.calls}) of replica {heartbeat.name}",
            }
            # In one order: both ranks may find it at once, each in its own replica.
            first, second = (f"rank {r} waits in {waits[r]}" for r in sorted(waits))
            return other.report_error(
                ValueError(
                    f"{first}, but {second}, counted from 1 as they were attached; {SAME}, over "
                    "all replicas of a process"
                )
            )
    return None


def _lacks(phase: Phase, calls: int, verb: str, exchanges: int) -> bool:
    """Return whether a rank in ``phase`` has not entered the call, or exchange, of another."""
    if phase.verb or not verb or phase.calls != calls:
        return False
    return verb != "backward" or phase.exchanges < exchanges
