"""The collective call in which a rank is, as its heartbeats publish it."""

import contextlib
from collections.abc import Iterator

from offbeat.liveness.failure import Phase


class Calls:
    """The part of :class:`Heartbeat` that follows the calls of this rank, one of ``ranks``."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self._phase = Phase()
        self._members: tuple[int, ...] = ()  # that the exchange of gradients joins

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that join its present call."""
        return self._members if self._phase.verb == "backward" else self.ranks

    @property
    def phase(self) -> Phase:
        """The collective call in which this rank is."""
        return self._phase

    @contextlib.contextmanager
    def verb(self, name: str) -> Iterator[None]:
        """Publish, from the next heartbeat on, that this rank is in the call ``name``."""
        outer, self._phase = self._phase, self._phase._replace(verb=name)
        try:
            yield
        finally:
            self._phase = outer

    @contextlib.contextmanager
    def backward(self, members: tuple[int, ...]) -> Iterator[None]:
        """Publish that this rank is in the exchange of a backward between ``members``."""
        phase, self._members = self._phase, members
        begun = phase._replace(exchanges=phase.exchanges + 1, turn=phase.turn + 1)
        self._phase = begun._replace(verb="backward")
        try:
            yield
        finally:
            self._phase = begun

    def next_call(self, verb: str) -> None:
        """Count a collective call that has ended; all ranks must have made the same one.

        ``verb`` is empty if it was refused.
        """
        phase = self._phase
        steps = phase.steps + (verb == "step")
        self._phase = phase._replace(calls=phase.calls + 1, verb="", steps=steps, turn=0)

    def resume(self, phase: Phase) -> None:
        """Continue the count of calls from ``phase``."""
        self._phase = phase._replace(verb="")
