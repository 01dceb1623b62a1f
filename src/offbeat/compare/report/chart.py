"""The geometry of line charts, in per cent of the chart's box.

The report scales with the window: lines are stretched, text and dots keep their size.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

Pair = tuple[float, float]
LABEL_GAP = 11.5  # minimum distance of two labels, in per cent of the height
LEAD = 96.0  # where the line from a curve's end to its label stops being level
ROOM = 1.06  # length of the x axis over the last point, for the lines to the labels


class Tick(NamedTuple):
    """A grid line at ``at`` per cent, with its label."""

    at: float
    text: str


class Mark(NamedTuple):
    """A dot, in per cent from the left and from the top, with the text of its tooltip."""

    left: float
    top: float
    text: str


@final
@dataclass(frozen=True)
class Series:
    """The points (x, y) of one method: a line, a faint line and dots."""

    name: str
    colour: str
    line: Sequence[Pair]
    faint: Sequence[Pair] = ()
    dots: Sequence[Pair] = ()


@final
@dataclass(frozen=True)
class Line:
    """A drawn series. Paths are SVG; the label is at the right edge, at ``label_top`` per cent."""

    name: str
    colour: str
    path: str
    faint: str
    lead: str  # from the end to the label
    dots: tuple[Mark, ...]
    end: Mark
    label_top: float
    label: str


@final
@dataclass(frozen=True)
class LineChart:
    """Lines on a common grid; ``level`` is a labelled horizontal line, such as the target loss."""

    lines: tuple[Line, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    level: Tick | None


class Frame(NamedTuple):
    """The data coordinates of the edges of a chart."""

    left: float
    right: float
    bottom: float
    top: float

    def to_percent(self, point: Pair) -> Pair:
        """Return per cent from the left and from the top; a point above the frame stays above."""
        x = (point[0] - self.left) / (self.right - self.left)
        y = (self.top - point[1]) / (self.top - self.bottom)
        return round(100 * x, 2), round(100 * min(max(y, -1.0), 1.0), 2)

    def path(self, points: Sequence[Pair]) -> str:
        """Return the SVG path through ``points``."""
        if not points:
            return ""
        return "M" + "L".join(f"{x:g} {y:g}" for x, y in map(self.to_percent, points))


def line_chart(series: Sequence[Series], unit: str, level: float | None = None) -> LineChart | None:
    """Lay out the series that have points; None if none has. ``unit`` is that of the x axis."""
    drawn = [kept for each in series if (kept := _finite_points(each)).line]
    if not drawn:
        return None
    frame = _frame(drawn, level)
    ends = [frame.to_percent(each.line[-1]) for each in drawn]
    tops = separate_labels([top for _, top in ends])
    lines = [_line(*each, frame, unit) for each in zip(drawn, tops, strict=True)]
    return LineChart(
        tuple(lines),
        tuple(
            Tick(frame.to_percent((x, frame.top))[0], f"{x:g}") for x in ticks(0, frame.right, 5)
        ),
        tuple(
            Tick(frame.to_percent((frame.left, y))[1], f"{y:g}")
            for y in ticks(frame.bottom, frame.top, 5)
        ),
        None if level is None else Tick(frame.to_percent((0, level))[1], f"{level:.3g}"),
    )


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return about ``count`` round numbers between ``low`` and ``high``.

    >>> ticks(0, 60, 5), ticks(1.1, 2.3, 5)
    ([0, 10, 20, 30, 40, 50, 60], [1.2, 1.4, 1.6, 1.8, 2.0, 2.2])
    """
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = min((power * x for x in (1, 2, 5, 10)), key=lambda step: abs(math.log(step / rough)))
    digits = max(0, -math.floor(math.log10(step)))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    found = [round(number * step, digits) for number in range(first, last + 1)]
    return [int(x) for x in found] if digits == 0 else found


def separate_labels(tops: Sequence[float], gap: float = LABEL_GAP) -> list[float]:
    """Move labels apart to a minimum distance of ``gap``, and keep them between 0 and 100.

    >>> separate_labels([50.0, 51.0, 99.0, 100.0], gap=8.0)
    [50.0, 58.0, 92.0, 100.0]
    """
    order = sorted(range(len(tops)), key=lambda index: tops[index])
    placed, floor = list(tops), -math.inf
    for index in order:
        floor = placed[index] = max(placed[index], floor + gap)
    ceiling = 100.0 + gap
    for index in reversed(order):
        ceiling = placed[index] = min(placed[index], ceiling - gap)
    return placed


def _line(series: Series, label_top: float, frame: Frame, unit: str) -> Line:
    def mark(point: Pair, kind: str) -> Mark:
        words = f"{series.name}: {kind} {point[1]:.4g} after {point[0]:.4g} {unit}"
        return Mark(*frame.to_percent(point), words)

    end = mark(series.line[-1], "loss")
    return Line(
        name=series.name,
        colour=series.colour,
        path=frame.path(series.line),
        faint=frame.path(series.faint),
        dots=tuple(mark(point, "held-out loss") for point in series.dots),
        lead=f"M{end.left} {end.top}L{LEAD} {end.top}L100 {label_top:.2f}",
        end=end,
        label_top=round(label_top, 2),
        label=f"{series.line[-1][1]:.3f}",
    )


def _frame(series: Sequence[Series], level: float | None) -> Frame:
    """Fit the last four fifths of all series: their steep beginning may leave the frame."""
    parts = [part for each in series for part in (each.line, each.dots)]
    shown = [y for part in parts for _, y in part[len(part) // 5 :]]
    shown += [] if level is None else [level]
    low, high = min(shown), max(shown)
    margin = 0.06 * (high - low) or 0.5
    right = max(x for each in series for x, _ in [*each.line, *each.dots]) * ROOM
    return Frame(0.0, right or 1.0, low - margin, high + margin)


def _finite_points(series: Series) -> Series:
    def finite(points: Sequence[Pair]) -> list[Pair]:
        return [point for point in points if math.isfinite(point[1])]

    lines = finite(series.line), finite(series.faint), finite(series.dots)
    return Series(series.name, series.colour, *lines)
