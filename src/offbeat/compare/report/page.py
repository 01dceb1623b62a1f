"""The contents of the report, as plain data for its template."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

from offbeat.compare import quantity
from offbeat.compare.curves import Point
from offbeat.compare.report.chart import LineChart, Series, Tick, line_chart, ticks
from offbeat.compare.report.timeline import Timeline
from offbeat.compare.result import Comparison, Result, Spread

COLOURS = 8  # defined by the style sheet


class Tile(NamedTuple):
    """A headline figure: the best method by one quantity."""

    title: str
    value: str
    name: str
    colour: str
    detail: str


class BarRow(NamedTuple):
    """The bar of one method; numbers are in per cent of the box."""

    name: str
    colour: str
    text: str
    width: float = 0.0
    low: float = 0.0
    high: float = 0.0
    floor: float | None = None


class BarPanel(NamedTuple):
    """The bars of one quantity."""

    title: str
    subtitle: str
    rows: list[BarRow]


@final
@dataclass(frozen=True)
class TimelineChart:
    """All timelines on a common axis of ``seconds``, the time of the longest step."""

    timelines: Sequence[Timeline]
    seconds: float
    ticks: list[Tick]


def colours(comparison: Comparison) -> dict[str, str]:
    """Return the CSS class of every method's colour; methods without communication share one."""
    names: dict[str, str] = {}
    for result in comparison.results:
        used = sum(colour != "floor" for colour in names.values())
        names[result.name] = "floor" if result.is_floor else f"c{used % COLOURS}"
    return names


def facts(comparison: Comparison) -> list[tuple[str, str]]:
    """Return the conditions of the comparison as pairs of name and value."""
    setup = comparison.setup
    per_node = sorted(set(setup.ranks_per_node))
    ranks = (
        "1 rank per node" if per_node == [1] else f"{'–'.join(map(str, per_node))} ranks per node"
    )
    found = [
        ("nodes", f"{len(setup.ranks_per_node)}, {ranks}"),
        ("links", "no rate limit" if setup.rate is None else quantity.rate(setup.rate)),
        ("steps", "unknown" if comparison.steps is None else f"{comparison.steps} per run"),
        ("rounds", str(comparison.rounds)),
        ("baseline", comparison.baseline),
    ]
    return found + ([("arguments", " ".join(setup.arguments))] if setup.arguments else [])


def tiles(comparison: Comparison) -> list[Tile]:
    """Return the methods with the fastest step, the shortest time to loss and the fewest bytes."""
    baseline = next((r for r in comparison.results if r.is_baseline), None)
    target = comparison.target_loss
    loss = "" if target is None else quantity.loss(target)
    kinds: list[tuple[str, Callable[[Result], Spread | None], Callable[[float], str]]] = [
        ("Fastest step", lambda r: r.seconds_per_step, quantity.seconds),
        (f"Shortest time to loss {loss}", lambda r: r.seconds_to_target, quantity.seconds),
        ("Fewest bytes sent", lambda r: r.bytes_per_step, quantity.size),
    ]
    made = [_tile(comparison, baseline, *kind) for kind in kinds]
    return [tile for tile in made if tile is not None]


def _tile(
    comparison: Comparison,
    baseline: Result | None,
    title: str,
    spread: Callable[[Result], Spread | None],
    text: Callable[[float], str],
) -> Tile | None:
    found = [(s.median, r) for r in comparison.results if not r.is_floor and (s := spread(r))]
    if len(found) < 2:
        return None
    value, best = min(found, key=lambda pair: pair[0])
    other = spread(baseline) if baseline else None
    detail = "the baseline itself"
    if not best.is_baseline:
        detail = f"{text(other.median)} with {comparison.baseline}" if other else ""
    return Tile(title, text(value), best.name, colours(comparison)[best.name], detail)


def bar_panels(comparison: Comparison) -> list[BarPanel]:
    """Return the bars of time, bytes and stall per step."""
    has_floor = any(result.floor for result in comparison.results)
    floor = "; mark: floor" if has_floor else ""
    return [
        _panel(
            comparison,
            "Time per step",
            f"median over rounds; thin line: minimum to maximum{floor}",
            lambda result: result.seconds_per_step,
            quantity.seconds,
            lambda result: result.floor.median if result.floor else None,
        ),
        _panel(
            comparison,
            "Bytes sent per step",
            "all ranks of the busiest node",
            lambda result: result.bytes_per_step,
            quantity.size,
        ),
        _panel(
            comparison,
            "Stall per step",
            "time that the training loop waits for other ranks",
            lambda result: result.stall_per_step,
            quantity.seconds,
        ),
    ]


def _panel(
    comparison: Comparison,
    title: str,
    subtitle: str,
    spread: Callable[[Result], Spread | None],
    text: Callable[[float], str],
    floor: Callable[[Result], float | None] = lambda result: None,
) -> BarPanel:
    known = [s.max for result in comparison.results if (s := spread(result))]
    scale = 100 / (max(known, default=0.0) or 1.0)
    rows = []
    for result in comparison.results:
        name, value, mark = result.name, spread(result), floor(result)
        row = BarRow(name, colours(comparison)[name], "unknown")
        if value is not None:
            width, low, high = (round(scale * x, 2) for x in (value.median, value.min, value.max))
            at = None if mark is None else round(scale * mark, 2)
            row = BarRow(name, row.colour, text(value.median), width, low, high, at)
        rows.append(row)
    return BarPanel(title, subtitle, rows)


def loss_chart(comparison: Comparison, x: Callable[[Point], float], unit: str) -> LineChart | None:
    """Plot the losses of all methods over ``x``; the held-out loss if it is the only one.

    Methods without communication are left out: their replicas diverge, and their losses would
    compress the scale of the others.
    """

    def pairs(points: Sequence[Point]) -> list[tuple[float, float]]:
        return [(x(point), point.loss) for point in points]

    names, series = colours(comparison), []
    for result in comparison.results:
        if not result.is_floor and (course := result.course) is not None:
            smooth, heldout = pairs(course.smooth), pairs(course.heldout)
            lines = smooth or heldout, pairs(course.train), heldout
            series.append(Series(result.name, names[result.name], *lines))
    target = comparison.target_loss
    return line_chart(series, unit, target if target and math.isfinite(target) else None)


def timeline_chart(timelines: Sequence[Timeline]) -> TimelineChart | None:
    """Arrange all timelines on a common time axis; None if there are none."""
    if not timelines:
        return None
    longest = max(track.seconds for timeline in timelines for track in timeline.tracks)
    marks = [Tick(round(100 * t / longest, 2), f"{t:g} s") for t in ticks(0, longest, 4)]
    return TimelineChart(timelines, longest, marks)
