"""One step as it happened, rank by rank: computing, waiting, and messages on the wire."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import final

from offbeat.compare.measure import warm_up
from offbeat.compare.plan import Plan
from offbeat.compare.record import Recording, Step
from offbeat.compare.run import Run

KINDS = ("forward", "backward", "stall", "wire")
MOST_RANKS = 8


@final
@dataclass(frozen=True)
class Bar:
    """What a rank did from ``start`` to ``end``, in seconds from the start of its step."""

    kind: str
    start: float
    end: float


@final
@dataclass(frozen=True)
class Lane:
    """One rank's step."""

    rank: int
    seconds: float
    bars: tuple[Bar, ...]


@final
@dataclass(frozen=True)
class Timeline:
    """A step of one method, on its first ranks; ``hidden`` ranks are left out."""

    method: str
    title: str
    lanes: tuple[Lane, ...]
    hidden: int = 0


def timelines(plan: Plan, runs: Sequence[Run]) -> list[Timeline]:
    """The steps to show of every method: of its last complete run, in the order of methods."""
    shown = []
    for method in plan.methods:
        complete = [run for run in runs if run.method == method and run.code == 0]
        if complete:
            shown += choose(method.text, complete[-1].recordings())
    return shown


def choose(method: str, recordings: Sequence[Recording]) -> list[Timeline]:
    """The median step; two where some steps send nothing: the median of those, and of others."""
    count = min(len(recording.steps) for recording in recordings)
    ranks = [recording.steps[warm_up(count) : count] for recording in recordings]
    steps = list(zip(*ranks, strict=True))
    silent = [step for step in steps if not any(sum(s.bytes_sent.values()) for s in step)]
    sending = [step for step in steps if step not in silent]
    if not silent or not sending:
        return [_timeline(method, "", recordings, steps)] if steps else []
    share = f"of {len(steps)} steps"
    return [
        _timeline(method, f"without exchange, {len(silent)} {share}", recordings, silent),
        _timeline(method, f"with exchange, {len(sending)} {share}", recordings, sending),
    ]


def _timeline(
    method: str, title: str, recordings: Sequence[Recording], steps: Sequence[Sequence[Step]]
) -> Timeline:
    ordered = sorted(steps, key=lambda step: fmean(rank.seconds for rank in step))
    middle = ordered[len(ordered) // 2]
    lanes = [_lane(r.rank, step) for r, step in zip(recordings, middle, strict=True)]
    return Timeline(method, title, tuple(lanes[:MOST_RANKS]), len(lanes[MOST_RANKS:]))


def _lane(rank: int, step: Step) -> Lane:
    bars = [Bar(kind, *span) for kind in KINDS for span in _merged(step, kind)]
    return Lane(rank, step.seconds, tuple(bars))


def _merged(step: Step, kind: str) -> list[tuple[float, float]]:
    """Spans of a kind inside the step, those that touch as one."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(step.between(kind)):
        start, end = max(0.0, start), min(step.seconds, end)
        # A thousandth of the step is less than can be seen.
        if merged and start <= merged[-1][1] + step.seconds / 1000:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > start:
            merged.append((start, end))
    return merged
