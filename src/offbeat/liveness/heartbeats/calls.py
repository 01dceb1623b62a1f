"""The collective call in which a rank is, as its heartbeats publish it."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator

from offbeat.liveness.failure import Phase


class Calls(ABC):
    """The part of :class:`Heartbeat` that follows the calls of this rank, one of ``ranks``.

    Attributes:
        name: the replica.
        phase: the collective call in which this rank is.
    """

    def __init__(self, rank: int, ranks: tuple[int, ...], name: str) -> None:
        self.rank, self.ranks, self.name = rank, ranks, name
        self.phase = Phase()
        self._members: tuple[int, ...] = ()  # that the exchange of gradients joins

    @property
    @abstractmethod
    def is_waiting(self) -> bool:
        """Whether this rank has waited for some time, in the training thread."""

    @abstractmethod
    def report_error(self, error: Exception) -> Exception:
        """Make ``error`` the agreed error unless there is one; return the agreed error."""

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that join its present call."""
        return self._members if self.phase.verb == "backward" else self.ranks

    @contextlib.contextmanager
    def verb(self, name: str) -> Iterator[None]:
        """Publish, from the next heartbeat on, that this rank is in the call ``name``."""
        outer, self.phase = self.phase, self.phase._replace(verb=name)
        try:
            yield
        finally:
            self.phase = outer

    @contextlib.contextmanager
    def backward(self, members: tuple[int, ...]) -> Iterator[None]:
        """Publish that this rank is in the exchange of a backward between ``members``."""
        phase, self._members = self.phase, members
        begun = phase._replace(exchanges=phase.exchanges + 1, turn=phase.turn + 1)
        self.phase = begun._replace(verb="backward")
        try:
            yield
        finally:
            self.phase = begun

    def next_call(self, verb: str) -> None:
        """Count a collective call that has ended; all ranks must have made the same one.

        ``verb`` is empty if it was refused.
        """
        phase = self.phase
        steps = phase.steps + (verb == "step")
        self.phase = phase._replace(calls=phase.calls + 1, verb="", steps=steps, turn=0)

    def resume(self, phase: Phase) -> None:
        """Continue the count of calls from ``phase``."""
        self.phase = phase._replace(verb="")
