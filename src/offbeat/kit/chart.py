"""The geometry of line charts, in per cent of the chart's box.

The report scales with the window: lines are stretched, text and dots keep their size.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

Pair = tuple[float, float]
LABEL_GAP = 11.5  # minimum distance of two labels, in per cent of the height
LEAD = 96.0  # where the line from a curve's end to its label stops being level


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

    def x_ticks(self, texts: Mapping[float, str]) -> tuple[Tick, ...]:
        """Return the grid lines at these values of x."""
        return tuple(Tick(self.to_percent((x, self.top))[0], text) for x, text in texts.items())

    def y_ticks(self, texts: Mapping[float, str]) -> tuple[Tick, ...]:
        """Return the grid lines at these values of y."""
        return tuple(Tick(self.to_percent((self.left, y))[1], text) for y, text in texts.items())

    def path(self, points: Sequence[Pair]) -> str:
        """Return the SVG path through ``points``."""
        if not points:
            return ""
        return "M" + "L".join(f"{x:g} {y:g}" for x, y in map(self.to_percent, points))


def draw(
    series: Sequence[Series],
    frame: Frame,
    words: Callable[[Pair, bool], str],
    label: Callable[[float], str],
    gap: float = LABEL_GAP,
) -> tuple[Line, ...]:
    """Draw all series, with labels ``gap`` apart.

    ``words`` are the text of a point, and of a dot if True, after the name; ``label`` that of the
    last y.
    """

    def mark(each: Series, point: Pair, is_dot: bool) -> Mark:
        return Mark(*frame.to_percent(point), f"{each.name}: {words(point, is_dot)}")

    ends = [mark(each, each.line[-1], False) for each in series]
    tops = separate_labels([end.top for end in ends], gap)
    return tuple(
        Line(
            name=each.name,
            colour=each.colour,
            path=frame.path(each.line),
            faint=frame.path(each.faint),
            lead=f"M{end.left} {end.top}L{LEAD} {end.top}L100 {top:.2f}",
            dots=tuple(mark(each, point, True) for point in each.dots),
            end=end,
            label_top=round(top, 2),
            label=label(each.line[-1][1]),
        )
        for each, end, top in zip(series, ends, tops, strict=True)
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
