"""Evaluation of heartbeats: whether a rank is at fault, and the resulting error."""

import contextlib
import json
import os
from datetime import timedelta
from typing import NamedTuple

from offbeat.comm.failure import SAME, PeerLost, Phase
from offbeat.comm.heartbeat_reader import Sign
from offbeat.comm.timed_store import TimedStore


class Wait(NamedTuple):
    """A wait of the training thread.

    Attributes:
        rank: this rank.
        phase: the phase in which it waits for other ranks; None if only a loss is a fault.
        members: the ranks that the exchange of a backward joins; used in the verb "backward" only.
        seconds: how long it has lasted.
    """

    rank: int
    phase: Phase | None
    members: tuple[int, ...]
    seconds: float


def find_fault(sign: Sign, wait: Wait, patience: float) -> Exception | None:
    """Return the error that another rank's heartbeat amounts to in a wait, or None.

    A rank counts as lost after ``patience`` seconds of silence.
    """
    rank, phase = wait.rank, wait.phase
    calls, verb = sign.phase.calls, sign.phase.verb
    if verb == "left":
        if phase is not None and (calls <= phase.calls or wait.seconds > patience):
            return PeerLost(
                f"rank {sign.rank} has left (detach) after {calls} calls, while rank {rank} "
                f"waits in {phase}; call detach() on all ranks after the same step"
            )
        return None
    if sign.silence > patience:
        return PeerLost(
            f"rank {sign.rank} is lost: no sign of life for {sign.silence:.0f} s, last "
            f"heartbeat in {sign.phase}. Look at the end of its log, then start again "
            "from the last checkpoint"
        )
    if phase is None:
        return None
    if phase.verb == "backward":
        return different_backwards(sign, wait) if _has_passed(sign, wait) else None
    return _disagreement(sign, rank, phase, wait.seconds > patience)


def _disagreement(sign: Sign, rank: int, phase: Phase, is_late: bool) -> Exception | None:
    calls, verb = sign.phase.calls, sign.phase.verb
    if verb == "backward":  # it judges for itself: it may still have to end what we have ended
        return None
    if verb and phase.verb and calls == phase.calls and verb != phase.verb:
        return ValueError(
            f"rank {sign.rank} is in {sign.phase}, but rank {rank} is in {phase}; {SAME}"
        )
    if phase.verb not in ("", "step") and calls > phase.calls and is_late:
        # No rank can complete a call of the whole world without this one: it made another call.
        return ValueError(
            f"rank {sign.rank} has gone on to call {calls}, but rank {rank} is in {phase}; {SAME}"
        )
    return None


def _has_passed(sign: Sign, wait: Wait) -> bool:
    """Return whether a rank is past this backward without having taken part in its exchange.

    The n-th exchange of a rank pairs with the n-th of all others. So a rank that has begun fewer
    and cannot begin another one before its next call will never answer this one. However slow the
    network is, this finds no fault where there is none.
    """
    mine, other = wait.phase, sign.phase
    assert mine is not None, "asked in a backward only"
    is_past = other.calls > mine.calls or (
        other.calls == mine.calls and other.verb not in ("", "backward")
    )
    return sign.rank in wait.members and is_past and other.exchanges < mine.exchanges


def different_backwards(sign: Sign, wait: Wait) -> ValueError:
    """Return the error for exchanges of different backwards, on two ranks."""
    return ValueError(
        f"rank {sign.rank} is in {sign.phase}, but rank {wait.rank} is in {wait.phase}: they "
        "made different numbers of backwards that exchange gradients; make equally many in every "
        "step on all ranks, and call set_requires_sync(False) before the others"
    )


def find_absence(sign: Sign, rank: int, phase: Phase, timeout: timedelta) -> Exception | None:
    """Return the error for an exchange that timed out, if the rank of ``sign`` was not in it."""
    if sign.phase.verb or sign.phase.calls > phase.calls or not phase.verb:
        return None
    return PeerLost(
        f"rank {sign.rank} was in {sign.phase} while rank {rank} waited for it in "
        f"{phase}: longer than the timeout of {timeout.total_seconds():g} s that "
        "init_process_group() was given; give it a longer one, or shorten the pause"
    )


def publish(error: Exception, store: TimedStore) -> Exception:
    """Write ``error`` into ``store`` unless another rank was first; return the one that stands."""
    kind = "user" if isinstance(error, ValueError) else "lost"
    verdict = json.dumps({"kind": kind, "text": str(error)})
    with contextlib.suppress(RuntimeError):  # without a store, this rank's own error must do
        verdict = store.compare_set("verdict", "", verdict).decode()
    stands = json.loads(verdict)
    return (ValueError if stands["kind"] == "user" else PeerLost)(stands["text"])


def store_lost(error: RuntimeError) -> PeerLost:
    """Return the error for a store that no longer answers: its host is lost, or the link to it."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    lost = (
        "the launcher is lost: it hosts the store"
        if agent
        else "rank 0 is lost: it hosts the store"
    )
    return PeerLost(f"{lost}, which no longer answers ({error})")
