"""The error that waits raise, and failure detection without heartbeats."""

import contextlib
from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import NamedTuple

from torch.distributed import ProcessGroup

from offbeat.liveness.error_context import ErrorContext
from offbeat.platform.process_group import end_waits


class PeerLost(RuntimeError):
    """Raised when a rank has failed or left early, with the same text on all other ranks.

    On a process group without heartbeats the text is this rank's own, and names no rank.
    """


SAME = "all ranks must make the same calls in the same order"


class Phase(NamedTuple):
    """Where a rank is in its sequence of collective calls.

    Attributes:
        calls: completed calls (``step``, ``finish``, ...) of the replica.
        verb: the call it is in; "backward" in the exchange of a backward, "" in its own code.
        steps: completed calls of ``step``.
        exchanges: exchanges of gradients that it has begun, so far in the run.
        turn: the same since the last call.
    """

    calls: int = 0
    verb: str = ""
    steps: int = 0
    exchanges: int = 0
    turn: int = 0

    def __str__(self) -> str:
        if self.verb == "backward":
            return f"backward {self.turn} of step {self.steps} (call {self.calls})"
        return f"{self.verb or 'its own code'} (call {self.calls})"


class NoHeartbeat:
    """Failure detection of a process group that another library has opened: its own timeout.

    It has the methods of :class:`~offbeat.liveness.heartbeats.heartbeat.Heartbeat` by which a group
    waits. Nothing is checked in a wait, which ends when the backend reports a broken connection, or
    when the timeout of the process group is over, with a :class:`PeerLost` on this rank.
    """

    phase = Phase()  # calls are not counted
    has_agreed_error = False  # nor do ranks agree on errors without a store

    def __init__(self, rank: int, ranks: tuple[int, ...]) -> None:
        self.rank, self.ranks = rank, ranks

    def report_pairing(self) -> Exception:
        """Return an error that names no rank."""
        return ValueError(
            f"rank {self.rank}: gradients met those of another step; make equally many backwards "
            "on all ranks"
        )

    def raise_agreed_error(self) -> None:
        """Return at once: there is none."""

    def watching(self) -> AbstractContextManager[None]:
        """Replace an error as :meth:`explaining` does."""
        return self.explaining()

    def attending(self) -> AbstractContextManager[None]:
        """Check nothing."""
        return contextlib.nullcontext()

    def explaining(self) -> AbstractContextManager[None]:
        """Replace a ``RuntimeError`` of torch by a :class:`PeerLost`."""
        return ErrorContext(self._explain)

    def _explain(self, error: RuntimeError) -> Exception:
        if isinstance(error, PeerLost):
            return error
        return PeerLost(
            f"rank {self.rank}: an exchange between the ranks {list(self.ranks)} failed "
            f"({error}); a rank has ended, or did not make the same call within the timeout "
            "of the process group: look at the end of all ranks' logs"
        )

    def report_error(self, error: Exception) -> Exception:
        """Return ``error``; the other ranks end by the timeout."""
        return error

    def release(self, group: ProcessGroup, connected: Collection[int] | None) -> None:
        """Make all pending waits on ``group`` fail; it is of no use afterwards."""
        with contextlib.suppress(ReferenceError):  # its owner has destroyed it
            end_waits(group, connected)

    def forget(self, *groups: ProcessGroup) -> None:
        """Return at once: no process group is referenced here."""
