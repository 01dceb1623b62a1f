"""What a sampler reads of a replica: its steps, and who was lost or has joined."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from offbeat.data.plan import Change

Entries = Sequence[dict[str, int]]
LIVES = 2**32  # a rank that joins under the number of a lost one is another member


class Training(Protocol):
    """What a sampler needs of an :class:`offbeat.Replica`.

    ``lost`` and ``joined`` are the same on all ranks, and grow in place. An entry has the rank and
    the "step" of :class:`Change`. One of ``lost`` may have "used", the number of steps whose
    samples count: without it, those before "step". One of ``joined`` may have "first", its first
    step with a batch: without it, the one after "step"; and "again", how many with its number were
    lost before.
    """

    steps: int
    lost: list[dict[str, int]]
    joined: list[dict[str, int]]
    is_new: bool

    @property
    def world(self) -> Any:
        """The layout, with ``rank`` and ``ranks``."""

    @property
    def weighting(self) -> Any:
        """What the steps stand for: ``now`` is None in a run without weights."""

    @property
    def algorithm(self) -> Any:
        """The algorithm, with its ``gradients`` or None."""

    def stats(self) -> dict[str, Any]:
        """Return the "seconds" and "seconds_stalled" of the "last" step."""

    def gather(self, text: str) -> list[str]:
        """Return what every rank passes; all ranks call."""

    def register(self, name: str, stateful: Any, *, is_saved: bool) -> None:
        """Let a rank that has joined load its state from that of another; save it, too."""


class Log(NamedTuple):
    """The entries of a replica, of which the first ones, by number, are older than the start.

    ``resized``: the sizes of batches by rank, as pairs, and the "step" in which they were agreed.
    """

    lost: Entries
    joined: Entries
    known: tuple[int, int] = (0, 0)
    resized: Sequence[dict[str, Any]] = ()

    def changes(self, start: int) -> list[Change]:
        """Return the changes from step ``start`` on, one for each step.

        An entry that was known at the start counts from there: training went back behind it.
        """
        lost, joined = (
            defaultdict[int, dict[int, int]](dict),
            defaultdict[int, dict[int, int]](dict),
        )
        for number, entry in enumerate(self.lost):
            if (step := entry["step"]) >= start:
                is_old = number < self.known[0]
                used = start if is_old else entry.get("used", step)
                lost[start if is_old else step][self.member(entry["rank"], number)] = used
        for number, entry in enumerate(self.joined):
            if (step := entry["step"]) >= start:
                is_old = number < self.known[1]
                first = start if is_old else entry.get("first", step + 1)
                member = entry["rank"] + LIVES * entry.get("again", 0)
                joined[start if is_old else step][member] = first
        sizes = {each["step"]: dict(each["sizes"]) for each in self.resized}
        steps = sorted({*lost, *joined, *(step for step in sizes if step >= start)})
        return [Change(step, lost[step], joined[step], sizes.get(step, {})) for step in steps]

    def members(self, ranks: Sequence[int], start: int) -> tuple[int, ...]:
        """Return who took part before the changes from step ``start`` on; ``ranks`` do now."""
        later = self.changes(start)
        lost = {rank for change in later for rank in change.lost}
        joined = {rank for change in later for rank in change.joined}
        return tuple(sorted(({*map(self.member, ranks)} | lost) - joined))

    def member(self, rank: int, losses: int | None = None) -> int:
        """Return the member that had this rank after the first ``losses``, or has it now."""
        return rank + LIVES * sum(loss["rank"] == rank for loss in self.lost[:losses])
