"""What the workers' logs say: which steps count, and where the rest of the time went."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf, nan
from pathlib import Path
from typing import Any

PARTS = {  # of the time of a step beyond its pause, by the calls in it
    "agree_on_survivors": "agreement",
    "connect_over": "connecting",
    "admit": "admission",
}


@dataclass
class Step:
    """A finished step: its number, when the one before ended, and its own times."""

    number: int
    before: float
    begin: float
    end: float
    spans: dict[str, float]
    counts: bool | None = None  # None: in an exchange that has not ended
    is_dropped: bool = False  # though its worker goes on


@dataclass
class Life:
    """One process of a rank, from its start to its death."""

    rank: int
    death: float  # or the end of the run
    is_killed: bool
    ready: float = inf  # the end of its imports
    waited: float = 0.0  # until the others let it in
    entered: float = inf
    steps: list[Step] = field(default_factory=list)
    losses: list[tuple[float, int, int]] = field(default_factory=list)  # time, rank, steps used
    digest: int | None = None  # of its parameters at the end
    heldout: float = nan  # the loss at the end
    made: int = 0  # steps until then

    @classmethod
    def read(cls, path: Path, rank: int, death: float, is_killed: bool) -> "Life":
        """Read the log of a process."""
        life, spans, begin = cls(rank, death, is_killed), dict[str, float](), inf
        for kind, when, *said in _lines(path):
            match kind:
                case "ready":
                    life.ready = when
                case "in":
                    life.entered, life.waited = when, spans.pop("pass_barrier", 0.0)
                case "begin":
                    begin = when
                case "span":
                    spans[said[0]] = spans.get(said[0], 0.0) + said[1]
                case "end":
                    before = life.steps[-1].end if life.steps else begin
                    life.steps.append(Step(said[0], before, begin, when, spans))
                    spans = {}
                case "commit" | "drop":
                    for step in (step for step in life.steps if step.counts is None):
                        step.counts, step.is_dropped = kind == "commit", kind == "drop"
                case "lost":
                    life.losses.append((when, *said))
                case "out":
                    life.digest, life.heldout, life.made = said
        return life

    def judge(self, losses: Iterable[tuple[float, int, int]]) -> None:
        """Say which steps count: those of a killed worker that an exchange has committed.

        Under this library the survivors say how many these are, as soon as they have agreed.
        """
        told = sorted(loss for loss in losses if loss[0] > self.death)
        after = [used for _, rank, used in told if rank == self.rank]
        for step in self.steps:
            if step.counts is None:
                step.counts = not self.is_killed or bool(after and step.number < after[0])

    @property
    def counted(self) -> list[Step]:
        """The steps that count."""
        return [step for step in self.steps if step.counts]


def _lines(path: Path) -> Iterator[list[Any]]:
    text = path.read_text("utf-8") if path.exists() else ""
    return map(json.loads, text.splitlines())


@dataclass
class Score:
    """The figures of one run, between the first kill's period and the end; all in seconds."""

    living: float = 0.0  # of all workers, from the end of their imports to their death
    useful: float = 0.0  # the pauses of steps that count
    gap: float = 0.0  # the longest time between the ends of two steps that are not dropped
    back: list[float] = field(default_factory=list)  # from the end of imports to such a step
    lost: int = 0  # steps that do not count, though they ended
    died_joining: int = 0
    parts: dict[str, float] = field(default_factory=dict)


def score(lives: Sequence[Life], pause: float, begin: float, end: float) -> Score:
    """Add up what all did in the window."""
    found = Score()
    losses = [loss for life in lives for loss in life.losses]
    for life in lives:
        life.judge(losses)
        since = max(life.ready, begin)
        if since >= life.death:
            continue
        found.living += life.death - since
        _add(found, life, pause, since, begin)
    rest = found.living - found.useful - sum(found.parts.values())
    found.parts["other"] = found.parts.get("other", 0.0) + rest
    return found


def _add(found: Score, life: Life, pause: float, since: float, begin: float) -> None:
    def add(part: str, seconds: float) -> None:
        found.parts[part] = found.parts.get(part, 0.0) + seconds

    counted = life.counted
    if life.ready > begin:
        if counted:
            found.back.append(counted[0].begin - life.ready)
        else:
            found.died_joining += life.is_killed
        join = min(life.entered, life.death) - life.ready
        waited = life.waited if life.entered < life.death else join
        add("waiting", waited)
        add("healing", join - waited)
    kept = (step.end for step in life.steps if step.end > since and not step.is_dropped)
    ends = [max(since, life.entered), *kept, life.death]
    if life.entered < life.death:
        found.gap = max(found.gap, *(b - a for a, b in pairwise(ends)))
        last = max(since, life.entered, life.steps[-1].end if life.steps else 0.0)
        add("unfinished" if life.is_killed else "other", life.death - last)
    for step in life.steps:
        if since < step.end <= life.death:
            found.useful += pause * bool(step.counts)
            found.lost += not step.counts
            add("uncommitted", 0.0 if step.counts else pause)
            left = step.end - max(since, step.before) - pause
            for span, seconds in step.spans.items():
                add(PARTS[span], seconds)
                left -= seconds
            add("detection" if "agree_on_survivors" in step.spans else "other", left)
