"""The timeout of the process group: a warning before it ends an exchange, and errors after it."""

import contextlib
import warnings
from collections.abc import Sequence
from typing import Any, final

from offbeat.liveness.failure import PeerLost, Phase
from offbeat.liveness.heartbeats.status_record import Failure
from offbeat.liveness.store.client import TimedStore
from offbeat.platform.process_group import timeout_of

WORDS = "imed out", "Application timeout"  # Gloo's, for the wait that timed out and those beside it


@final
class Timeout:
    """The timeout of the groups of one replica."""

    def __init__(self, groups: Sequence[tuple[Any, ...]], store: TimedStore) -> None:
        """Read it from the first of ``groups``, once it is open."""
        self._groups, self._store, self._has_warned = groups, store, False

    @property
    def seconds(self) -> float | None:
        """How long an exchange may take; None before a group is open."""
        return timeout_of(self._groups[0][0]).total_seconds() if self._groups else None

    def behind(self, error: RuntimeError) -> float | None:
        """Return the timeout if ``error`` of torch says that it is over, else None.

        Before the first group is open it is a matter of the network, not of a rank.
        """
        return self.seconds if any(words in str(error) for words in WORDS) else None

    def warn(self, rank: int, phase: Phase, waited: float) -> None:
        """Warn once, on one of the ranks, if a wait has taken half of the timeout."""
        if self._has_warned or self.seconds is None or waited < self.seconds / 2:
            return
        self._has_warned = True
        if self._store.add("slow", 1) == 1:
            with contextlib.suppress(RuntimeWarning):  # as an error it would end the heartbeat
                warnings.warn(
                    f"rank {rank} has waited for {waited:.1f} s in {phase}, and no rank is lost; "
                    f"an exchange that takes longer than {_limit(self.seconds)} fails; {_FIX}",
                    RuntimeWarning,
                    stacklevel=2,
                )


def find_absence(failure: Failure, rank: int, phase: Phase) -> Exception | None:
    """Return the error for an exchange that timed out, if ``rank`` was not in it."""
    there = failure.phase
    if failure.timeout is None or phase.verb or phase.calls > there.calls or not there.verb:
        return None
    return PeerLost(
        f"rank {rank} was in {phase} while rank {failure.rank} waited for it in "
        f"{there}: longer than {_limit(failure.timeout)}; {_FIX}, or shorten the pause"
    )


def unexplained(rank: int, error: RuntimeError, failure: Failure | None) -> PeerLost:
    """Return the error for an exchange that failed although no rank is lost or elsewhere.

    ``failure`` is the first on any rank, of which ``error`` may be a consequence.
    """
    if failure is None or failure.timeout is None:
        return PeerLost(f"rank {rank}: an exchange failed although all ranks live: {error}")
    return PeerLost(
        f"rank {failure.rank}: an exchange in {failure.phase} took longer than "
        f"{_limit(failure.timeout)}, although all ranks live: the network or a rank is too slow "
        f"for it; {_FIX}"
    )


def _limit(seconds: float) -> str:
    return f"the timeout of {seconds:g} s that init_process_group() was given"


_FIX = "give it a longer one, torch.distributed.init_process_group(timeout=timedelta(seconds=...))"
