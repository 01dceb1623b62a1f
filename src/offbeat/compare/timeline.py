"""One step as it happened, rank by rank: computing, waiting, and messages on the wire."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import final

from offbeat.compare.experiment import Experiment
from offbeat.compare.measure import warm_up
from offbeat.compare.run import Run
from offbeat.telemetry.recording import Recording, Step

KINDS = ("forward", "backward", "stall", "exchange")
EXCHANGES = ("without exchange", "while a message travels", "with exchange")
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
class Track:
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
    lanes: tuple[Track, ...]
    hidden: int = 0


def timelines(plan: Experiment, runs: Sequence[Run]) -> list[Timeline]:
    """The steps to show of every method: of its last complete run, in the order of methods."""
    shown = []
    for method in plan.methods:
        complete = [run for run in runs if run.method == method and run.code == 0]
        if complete:
            shown += representative(method.text, complete[-1].recordings())
    return shown


def representative(method: str, recordings: Sequence[Recording]) -> list[Timeline]:
    """The median step; where steps are of several kinds, the median of each kind."""
    count = min(len(recording.steps) for recording in recordings)
    ranks = [recording.steps[warm_up(count) : count] for recording in recordings]
    steps = list(zip(*ranks, strict=True))
    kinds = [_exchange(step) for step in steps]
    shown = []
    for kind in (kind for kind in EXCHANGES if kind in kinds):
        alike = [step for step, found in zip(steps, kinds, strict=True) if found == kind]
        title = "" if len(alike) == len(steps) else f"{kind}, {len(alike)} of {len(steps)} steps"
        shown.append(_timeline(method, title, recordings, alike))
    return shown


def _exchange(ranks: Sequence[Step]) -> str:
    """What a step does on the axes that lead out of a node."""
    if any(sent for step in ranks for axis, sent in step.bytes_sent.items() if axis != "local"):
        return EXCHANGES[2]
    out = ("exchange:world", "exchange:node")
    travels = any(kind in out and end > 0 for step in ranks for kind, _, end in step.spans)
    return EXCHANGES[1] if travels else EXCHANGES[0]


def _timeline(
    method: str, title: str, recordings: Sequence[Recording], steps: Sequence[Sequence[Step]]
) -> Timeline:
    ordered = sorted(steps, key=lambda step: fmean(rank.seconds for rank in step))
    middle = ordered[len(ordered) // 2]
    lanes = [_lane(r.rank, step) for r, step in zip(recordings, middle, strict=True)]
    return Timeline(method, title, tuple(lanes[:MOST_RANKS]), len(lanes[MOST_RANKS:]))


def _lane(rank: int, step: Step) -> Track:
    bars = [Bar(kind, *span) for kind in KINDS for span in _merged(step, kind)]
    return Track(rank, step.seconds, tuple(bars))


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
