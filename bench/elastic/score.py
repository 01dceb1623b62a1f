"""What the workers' logs say: which steps count, and where the rest of the time went."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf, nan
from pathlib import Path

from offbeat.telemetry.recording import read_run

# Where time goes that is not useful.
LOST = NOT_SENT, DETECTION, *TIMED, JOINING, OTHER = (
    "not in an exchange", "detection", "agreement", "connecting", "healing", "joining", "other"
)  # fmt: skip


@dataclass
class Step:
    """A finished step: its number, and when the one before and it ended."""

    number: int
    begin: float
    end: float
    part: str  # what its time is beyond the pause and what is timed
    timed: dict[str, float] = field(default_factory=dict)
    counts: bool | None = None  # None: in an exchange that has not ended
    is_dropped: bool = False  # though its worker goes on


@dataclass
class Life:
    """One process of a rank, from its start to its death, or to the end of the run."""

    rank: int
    death: float = inf
    is_killed: bool = False
    ready: float = inf  # the end of its imports
    entered: float = inf
    steps: list[Step] = field(default_factory=list)
    losses: list[tuple[float, int, int]] = field(default_factory=list)  # time, rank, steps used
    digest: int | None = None  # of its parameters at the end
    heldout: float = nan  # the loss at the end
    made: int = 0  # steps until then

    @classmethod
    def read(cls, path: Path) -> "Life":
        """Read the log of a process, whose name begins with the rank, and what it recorded."""
        life = cls(int(path.name.split(".")[0]))
        for kind, when, *said in map(json.loads, path.read_text("utf-8").splitlines()):
            match kind:
                case "ready":
                    life.ready = when
                case "in":
                    life.entered = when
                case "end":
                    number, part = said
                    begin = life.steps[-1].end if life.steps else life.entered
                    life.steps.append(Step(number, begin, when, part))
                case "commit" | "drop":
                    for step in (step for step in life.steps if step.counts is None):
                        step.counts, step.is_dropped = kind == "commit", kind == "drop"
                case "lost":
                    life.losses.append((when, *said))
                case "out":
                    life.digest, life.heldout, life.made = said
                case "killed" | "stopped":
                    life.death, life.is_killed = when, kind == "killed"
        for recording in read_run(recordings(path)):
            joined = bool(life.steps and life.steps[0].number)  # at the end of a step, its first
            for step, recorded in zip(life.steps, recording.steps[joined:], strict=False):
                step.timed = {
                    kind: sum(end - begin for begin, end in recorded.spans_of(kind))
                    for kind in TIMED
                }
        return life


def read(folder: Path) -> list[Life]:
    """Read the logs of all processes, and what they recorded."""
    return [Life.read(path) for path in sorted(folder.glob("*.*"))]


def recordings(path: Path) -> Path:
    """Return the folder in which the process of a log records its steps."""
    return path.parent / "recordings" / path.name


@dataclass
class Score:
    """The figures of one run in a window; all in seconds."""

    living: float = 0.0  # of all workers, from the end of their imports to their death
    useful: float = 0.0  # the pauses of steps that count
    gap: float = 0.0  # the longest time between the ends of two steps that are not dropped
    back: list[float] = field(default_factory=list)  # from the end of imports to such a step
    lost: int = 0  # steps that do not count, though they ended
    parts: dict[str, float] = field(default_factory=dict)  # of the time that is not useful


def score(lives: Sequence[Life], pause: float, begin: float, end: float) -> Score:
    """Add up what all did from ``begin`` to ``end``.

    Steps of a killed worker count if an exchange has committed them. Under this library the
    survivors say how many these are, as soon as they have agreed.
    """
    found, parts = Score(), Counter[str]()
    losses = sorted(loss for life in lives for loss in life.losses)
    for life in lives:
        used = [u for when, rank, u in losses if when > life.death and rank == life.rank]
        for step in life.steps:
            if step.counts is None:
                step.counts = not life.is_killed or bool(used and step.number < used[0])
        life.death = min(life.death, end)
        since = max(life.ready, begin)
        if since < life.death:
            found.living += life.death - since
            add(found, parts, life, pause, since, is_new=life.ready > begin)
    parts[OTHER] += found.living - found.useful - parts.total()
    found.parts = dict(parts)
    return found


def add(
    found: Score, parts: Counter[str], life: Life, pause: float, since: float, is_new: bool
) -> None:
    """Add one life, of which the time before ``since`` does not count."""
    if is_new:
        found.back += [step.begin - life.ready for step in life.steps if step.counts][:1]
        parts[JOINING] += min(life.entered, life.death) - life.ready
    if life.entered < life.death:
        kept = (step.end for step in life.steps if step.end > since and not step.is_dropped)
        ends = [max(since, life.entered), *kept, life.death]
        found.gap = max(found.gap, *(b - a for a, b in pairwise(ends)))
        last = max(since, life.entered, *(step.end for step in life.steps[-1:]))
        parts[NOT_SENT if life.is_killed else OTHER] += life.death - last
    for step in life.steps:
        if since < step.end <= life.death:
            found.useful += pause * bool(step.counts)
            found.lost += not step.counts
            parts[NOT_SENT] += 0.0 if step.counts else pause
            parts.update(step.timed)
            beyond = step.end - max(since, step.begin) - pause
            parts[step.part] += beyond - sum(step.timed.values())
