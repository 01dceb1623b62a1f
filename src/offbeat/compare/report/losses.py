"""The charts of losses over time and over steps."""

import math
from collections.abc import Callable, Mapping, Sequence

from offbeat.compare.curves import Point
from offbeat.compare.result import Comparison
from offbeat.kit.chart import Frame, LineChart, Pair, Series, draw, ticks

ROOM = 1.06  # length of the x axis over the last point, for the lines to the labels


def loss_chart(
    comparison: Comparison, colours: Mapping[str, str], x: Callable[[Point], float], unit: str
) -> LineChart | None:
    """Plot the losses of all methods over ``x``, None if there are none.

    The held-out loss is the line if it is the only one. Methods without communication are left
    out: their replicas diverge, and their losses would compress the scale of the others.
    """

    def pairs(points: Sequence[Point]) -> list[Pair]:
        return [(x(point), point.loss) for point in points if math.isfinite(point.loss)]

    drawn = []
    for result in comparison.results:
        if not result.is_floor and (course := result.course) is not None:
            smooth, train, heldout = map(pairs, (course.smooth, course.train, course.heldout))
            if line := smooth or heldout:
                drawn.append(Series(result.name, colours[result.name], line, train, heldout))
    if not drawn:
        return None
    target = comparison.target_loss
    level = target if target and math.isfinite(target) else None
    frame = _frame(drawn, level)
    return LineChart(
        draw(
            drawn,
            frame,
            lambda point, is_dot: (
                f"{'held-out ' * is_dot}loss {point[1]:.4g} after {point[0]:.4g} {unit}"
            ),
            lambda loss: f"{loss:.3f}",
        ),
        frame.x_ticks({x: f"{x:g}" for x in ticks(0, frame.right, 5)}),
        frame.y_ticks({y: f"{y:g}" for y in ticks(frame.bottom, frame.top, 5)}),
        None if level is None else frame.y_ticks({level: f"{level:.3g}"})[0],
    )


def _frame(series: Sequence[Series], level: float | None) -> Frame:
    """Fit the last four fifths of all series: their steep beginning may leave the frame."""
    parts = [part for each in series for part in (each.line, each.dots)]
    shown = [y for part in parts for _, y in part[len(part) // 5 :]]
    shown += [] if level is None else [level]
    low, high = min(shown), max(shown)
    margin = 0.06 * (high - low) or 0.5
    right = max(x for part in parts for x, _ in part) * ROOM
    return Frame(0.0, right or 1.0, low - margin, high + margin)
