"""The loss curves of a method, merged over its rounds."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import final

from offbeat.compare.measure import LossCurve

MAX_POINTS = 400


@final
@dataclass(frozen=True)
class Point:
    """A loss after ``step`` optimizer steps and ``seconds`` of training."""

    step: int
    seconds: float
    loss: float


@final
@dataclass(frozen=True)
class LossCurves:
    """Medians over rounds of the training loss, smoothed and raw, and of the held-out loss."""

    smooth: tuple[Point, ...]
    train: tuple[Point, ...]
    heldout: tuple[Point, ...]


def merge_curves(curves: Sequence[LossCurve]) -> LossCurves:
    """Merge the curves of a method's complete runs; long curves are thinned to 400 points."""
    steps = min(len(curve.seconds) for curve in curves)
    clock = [median(curve.seconds[k] for curve in curves) for k in range(steps)]

    def points(losses: Sequence[Sequence[float | None]]) -> tuple[Point, ...]:
        each = [[x for loss in losses if (x := loss[k]) is not None] for k in range(steps)]
        known = [k for k in range(steps) if each[k]]
        stride = -(-len(known) // MAX_POINTS) or 1
        shown = sorted({*known[::stride], *known[-1:]})
        return tuple(Point(k + 1, clock[k], median(each[k])) for k in shown)

    return LossCurves(
        smooth=points([curve.smooth for curve in curves]),
        train=points([curve.loss for curve in curves]),
        heldout=_heldout(curves, clock),
    )


def _heldout(curves: Sequence[LossCurve], clock: Sequence[float]) -> tuple[Point, ...]:
    losses: dict[int, list[float]] = {}
    for curve in curves:
        for step, loss in curve.heldout:
            losses.setdefault(step, []).append(loss)
    return tuple(
        Point(step, clock[step - 1] if step else 0.0, median(values))
        for step, values in sorted(losses.items())
        if step <= len(clock)
    )
