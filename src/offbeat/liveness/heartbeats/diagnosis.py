"""Evaluation of heartbeats: whether a rank is at fault, and the resulting error."""

import os
import time
from collections.abc import Sequence
from typing import NamedTuple

from offbeat.liveness.failure import SAME, PeerLost, Phase
from offbeat.liveness.heartbeats.ring import Patience, Sign


class Wait(NamedTuple):
    """A wait of this rank.

    Attributes:
        rank: this rank.
        phase: the phase in which it waits for other ranks; None if only a loss is a fault.
        members: the ranks that the exchange of a backward joins; used in the verb "backward" only.
        is_late: whether it has lasted for long.
        has_met_another: whether its gradients have met those of another step.
        is_overdue: whether it is an error that another rank is in a later call.
    """

    rank: int
    phase: Phase | None
    members: tuple[int, ...]
    is_late: bool = False
    has_met_another: bool = False
    is_overdue: bool = False


class Ahead:
    """For how long others have been in later calls than this rank, in a run that survives losses.

    They may have committed a call in which one is lost: this rank finds that loss first.
    """

    def __init__(self) -> None:
        self._call, self._since = -1, 0.0

    def excuse(self, wait: Wait, calls: int, signs: Sequence[Sign], patience: Patience) -> Wait:
        """Return the wait, overdue only long after others were first seen past call ``calls``."""
        if not any(sign.phase.calls > calls for sign in signs):
            self._call = -1
            return wait._replace(is_overdue=False)
        if self._call != calls:
            self._call, self._since = calls, time.monotonic()
        lasts = time.monotonic() - self._since > 3 * patience.normal * patience.stretch
        return wait._replace(is_overdue=wait.is_overdue and lasts)


def find_fault(sign: Sign, wait: Wait) -> Exception | None:
    """Return the error that another rank's heartbeat amounts to in a wait, or None."""
    rank, phase = wait.rank, wait.phase
    calls, verb = sign.phase.calls, sign.phase.verb
    if verb == "left":
        # A rank in its own code, whose exchange in the background has failed, may be about to leave
        # as well; its next call shows.
        if phase is not None and (wait.is_late or (phase.verb and calls <= phase.calls)):
            return PeerLost(
                f"rank {sign.rank} has left (detach) after {calls} calls, while rank {rank} "
                f"waits in {phase}; call detach() on all ranks after the same step"
            )
        return None
    if sign.loss:
        return PeerLost(
            f"rank {sign.rank} is lost: {sign.loss}, last heartbeat in {sign.phase}. "
            "Look at the end of its log, then start again from the last checkpoint"
        )
    if phase is None:
        return None
    is_met = wait.has_met_another and _is_of_another_step(sign.phase, phase)
    if sign.rank in wait.members and (_is_passed_by(sign.phase, phase) or is_met):
        called = next((v for v in (verb, phase.verb) if v not in ("", "backward", "step")), "")
        some = f", call {called}() on all ranks (not under `if rank == 0:`)" if called else ""
        return ValueError(
            f"rank {sign.rank} is in {sign.phase}, but rank {rank} is in {phase}: they made "
            "different numbers of backwards that exchange gradients; give all ranks equally many "
            f"batches (drop_last=True, or a fixed number of steps){some}, and call "
            "set_requires_sync(False) before backwards whose number may differ within a step"
        )
    return _disagreement(sign, rank, phase, wait.is_overdue)


def comes_to_front(wait: Wait, front: int | None, signs: Sequence[Sign]) -> bool:
    """Return whether all ranks that wait should compare themselves with this one, not ``front``.

    So it is if the latter is not as far. A rank in another call may be no neighbour of any that
    waits: those between compute.
    """
    here = wait.phase
    if here is None or here.verb in ("", "backward") or front == wait.rank:
        return False
    there = next((sign.phase for sign in signs if sign.rank == front), None)
    return front is None or (there is not None and not _is_ahead(there, here))


def _is_ahead(there: Phase, here: Phase) -> bool:
    """Return whether a rank in ``there`` has come at least as far as one that waits in ``here``.

    In a call of all ranks, or past it: the others are compared with the one that is furthest.
    """
    in_a_call = there.verb not in ("", "backward", "left")
    return there.calls > here.calls or (there.calls == here.calls and in_a_call)


def _disagreement(sign: Sign, rank: int, phase: Phase, is_overdue: bool) -> Exception | None:
    calls, verb = sign.phase.calls, sign.phase.verb
    if "backward" in (verb, phase.verb):  # it judges for itself: it may have to end what we ended
        return None
    if verb and phase.verb and calls == phase.calls and verb != phase.verb:
        return ValueError(
            f"rank {sign.rank} is in {sign.phase}, but rank {rank} is in {phase}; {SAME}"
        )
    if phase.verb not in ("", "step", "switching") and calls > phase.calls and is_overdue:
        # No rank can complete a call of the whole world without this one: it made another call.
        # But for those that are transactions, as all are in an elastic run: this rank may find its
        # call to be committed after a loss, which it would know of by now.
        return ValueError(
            f"rank {sign.rank} has gone on to call {calls}, but rank {rank} is in {phase}; {SAME}"
        )
    return None


def _is_passed_by(there: Phase, here: Phase) -> bool:
    """Return whether a rank is past our backward without having taken part in its exchange.

    The n-th exchange of a rank pairs with the n-th of all others. So a rank that has begun fewer
    and cannot begin another one before its next call will never answer this one. However slow the
    network is, this finds no fault where there is none.
    """
    is_past = _is_ahead(there, here) and there.exchanges < here.exchanges
    return here.verb == "backward" and is_past


def _is_of_another_step(there: Phase, here: Phase) -> bool:
    """Return whether a rank is in the same exchange as we are, of another step."""
    is_same = there.verb == "backward" and there.exchanges == here.exchanges
    return is_same and there.calls != here.calls


def different_steps(rank: int, phase: Phase) -> ValueError:
    """Return the error for gradients of ``rank`` that met those of another step."""
    return ValueError(
        f"rank {rank} is in {phase}, and its gradients met those of another step; make equally "
        "many backwards in every step on all ranks"
    )


def store_lost(error: RuntimeError) -> PeerLost:
    """Return the error for a store that no longer answers: its host is lost, or the link to it."""
    if (address := os.environ.get("OFFBEAT_STORE")) is not None:
        lost = f"the store at {address} is lost"
    elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        lost = "the launcher is lost: it hosts the store"
    else:
        lost = "rank 0 is lost: it hosts the store"
    return PeerLost(f"{lost}, which no longer answers ({error})")
