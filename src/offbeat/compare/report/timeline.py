"""The timeline of one step on every rank: computation, stalls and exchanges."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import final

from offbeat.compare.experiment import Experiment
from offbeat.compare.measure import warm_up
from offbeat.compare.run import Run
from offbeat.telemetry.recording import Recording, Step

KINDS = ("forward", "backward", "stall", "exchange")
EXCHANGES = ("without exchange", "message in flight", "with exchange")
MAX_RANKS = 8


@final
@dataclass(frozen=True)
class Span:
    """An activity of a rank, from ``start`` to ``end`` in seconds since the start of its step."""

    kind: str
    start: float
    end: float


@final
@dataclass(frozen=True)
class Track:
    """The spans of one step on one rank."""

    rank: int
    seconds: float
    spans: tuple[Span, ...]


@final
@dataclass(frozen=True)
class Timeline:
    """A step of one method on its first ranks; ``hidden`` is the number of ranks left out."""

    method: str
    title: str
    tracks: tuple[Track, ...]
    hidden: int = 0


def timelines(experiment: Experiment, runs: Sequence[Run]) -> list[Timeline]:
    """Select the representative steps of every method, from its last complete run."""
    shown = []
    for method in experiment.methods:
        complete = [run for run in runs if run.method == method and run.code == 0]
        if complete:
            shown += representative_steps(method.text, complete[-1].recordings())
    return shown


def representative_steps(method: str, recordings: Sequence[Recording]) -> list[Timeline]:
    """Select the step of median time, one for each kind of exchange that occurs.

    The kinds are steps without an exchange, steps during which a message of an earlier step is
    still in flight, and steps that send. Exchanges inside a node do not count.
    """
    count = min(len(recording.steps) for recording in recordings)
    ranks = [recording.steps[warm_up(count) : count] for recording in recordings]
    steps = list(zip(*ranks, strict=True))
    kinds = [_exchange_kind(step) for step in steps]
    shown = []
    for kind in (kind for kind in EXCHANGES if kind in kinds):
        alike = [step for step, found in zip(steps, kinds, strict=True) if found == kind]
        title = "" if len(alike) == len(steps) else f"{kind}, {len(alike)} of {len(steps)} steps"
        shown.append(_timeline(method, title, recordings, alike))
    return shown


def _exchange_kind(ranks: Sequence[Step]) -> str:
    """Classify a step by its exchanges on the axes "world" and "node"."""
    if any(sent for step in ranks for axis, sent in step.bytes_sent.items() if axis != "local"):
        return EXCHANGES[2]
    between = ("exchange:world", "exchange:node")
    in_flight = any(kind in between and end > 0 for step in ranks for kind, _, end in step.spans)
    return EXCHANGES[1] if in_flight else EXCHANGES[0]


def _timeline(
    method: str, title: str, recordings: Sequence[Recording], steps: Sequence[Sequence[Step]]
) -> Timeline:
    ordered = sorted(steps, key=lambda step: fmean(rank.seconds for rank in step))
    middle = ordered[len(ordered) // 2]
    tracks = [_track(r.rank, step) for r, step in zip(recordings, middle, strict=True)]
    return Timeline(method, title, tuple(tracks[:MAX_RANKS]), len(tracks[MAX_RANKS:]))


def _track(rank: int, step: Step) -> Track:
    found = [Span(kind, *ends) for kind in KINDS for ends in _merged(step, kind)]
    return Track(rank, step.seconds, tuple(found))


def _merged(step: Step, kind: str) -> list[tuple[float, float]]:
    """Return the spans of a kind, cut to the step; adjacent ones are joined."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(step.spans_of(kind)):
        start, end = max(0.0, start), min(step.seconds, end)
        # A gap below a thousandth of the step is not visible in the chart.
        if merged and start <= merged[-1][1] + step.seconds / 1000:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > start:
            merged.append((start, end))
    return merged
