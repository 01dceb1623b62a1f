"""The course of a method's losses, over its rounds."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import final

from offbeat.compare.measure import Curve

MOST_POINTS = 400


@final
@dataclass(frozen=True)
class Point:
    """A loss after so many steps and seconds of training."""

    step: int
    seconds: float
    loss: float


@final
@dataclass(frozen=True)
class Course:
    """Medians over rounds: the smooth training loss, the raw one, and the held-out loss."""

    smooth: tuple[Point, ...]
    train: tuple[Point, ...]
    heldout: tuple[Point, ...]


def course(curves: Sequence[Curve]) -> Course:
    """Of one method's complete runs; a long one is thinned to 400 points."""
    steps = min(len(curve.seconds) for curve in curves)
    clock = [median(curve.seconds[k] for curve in curves) for k in range(steps)]
    stride = -(-steps // MOST_POINTS)
    shown = sorted({*range(0, steps, stride), steps - 1})

    def points(losses: Sequence[Sequence[float | None]]) -> tuple[Point, ...]:
        known = {k: [x for loss in losses if (x := loss[k]) is not None] for k in shown}
        return tuple(Point(k + 1, clock[k], median(x)) for k, x in known.items() if x)

    return Course(
        smooth=points([curve.smooth for curve in curves]),
        train=points([curve.loss for curve in curves]),
        heldout=_heldout(curves, clock),
    )


def _heldout(curves: Sequence[Curve], clock: Sequence[float]) -> tuple[Point, ...]:
    losses: dict[int, list[float]] = {}
    for curve in curves:
        for step, loss in curve.heldout:
            losses.setdefault(step, []).append(loss)
    return tuple(
        Point(step, clock[step - 1] if step else 0.0, median(values))
        for step, values in sorted(losses.items())
        if step <= len(clock)
    )
