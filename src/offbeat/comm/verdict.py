"""Evaluation of heartbeats: whether a rank is at fault, and the resulting error."""

import contextlib
import json
import os
from typing import NamedTuple

from torch.distributed import Store

from offbeat.comm.failure import PeerLost

Phase = tuple[int, str]  # collective calls so far, and the current one, or "" between calls


class Sign(NamedTuple):
    """Last heartbeat of a rank: its phase, and for how many seconds it has been silent."""

    rank: int
    phase: Phase
    silence: float


def find_fault(
    sign: Sign, rank: int, phase: Phase | None, patience: float, waited: float
) -> Exception | None:
    """Return the error that a heartbeat amounts to, or None.

    Args:
        sign: the heartbeat of another rank.
        rank: this rank.
        phase: the phase in which this rank waits for all others; None if only a loss is a fault.
        patience: seconds of silence after which a rank counts as lost.
        waited: seconds since this wait began.
    """
    calls, verb = sign.phase
    if verb == "left":
        if phase is not None and (calls <= phase[0] or waited > patience):
            return PeerLost(
                f"rank {sign.rank} has left (detach) after {calls} calls, while rank {rank} "
                f"waits in {_call(phase)}; call detach() on all ranks after the same step"
            )
        return None
    if sign.silence > patience:
        return PeerLost(
            f"rank {sign.rank} is lost: no sign of life for {sign.silence:.0f} s, last "
            f"heartbeat in {_call(sign.phase)}. Look at the end of its log, then start again "
            "from the last checkpoint"
        )
    return None if phase is None else _disagreement(sign, rank, phase, waited > patience)


def _disagreement(sign: Sign, rank: int, phase: Phase, is_late: bool) -> Exception | None:
    calls, verb = sign.phase
    same = "all ranks must make the same calls in the same order"
    if verb and phase[1] and calls == phase[0] and verb != phase[1]:
        return ValueError(
            f"rank {sign.rank} is in {_call(sign.phase)}, but rank {rank} is in {_call(phase)}; "
            + same
        )
    if phase[1] not in ("", "step") and calls > phase[0] and is_late:
        # No rank can complete a call of the whole world without this one: it made another call.
        return ValueError(
            f"rank {sign.rank} has gone on to call {calls}, but rank {rank} is in "
            f"{_call(phase)}; " + same
        )
    return None


def publish(error: Exception, store: Store) -> Exception:
    """Write ``error`` into ``store`` unless another rank was first; return the one that stands."""
    kind = "user" if isinstance(error, ValueError) else "lost"
    verdict = json.dumps({"kind": kind, "text": str(error)})
    with contextlib.suppress(RuntimeError):  # without a store, this rank's own error must do
        verdict = store.compare_set("verdict", "", verdict).decode()
    stands = json.loads(verdict)
    return (ValueError if stands["kind"] == "user" else PeerLost)(stands["text"])


def store_lost(error: RuntimeError) -> PeerLost:
    """Return the error for a store that no longer answers: its host is lost."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    lost = (
        "the launcher is lost: it hosts the store"
        if agent
        else "rank 0 is lost: it hosts the store"
    )
    return PeerLost(f"{lost}, which no longer answers ({error})")


def _call(phase: Phase) -> str:
    return f"{phase[1] or 'its own code'} (call {phase[0]})"
