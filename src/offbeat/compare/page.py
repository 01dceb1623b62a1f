"""What the page says, as plain data for its template."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

from offbeat.compare import quantity
from offbeat.compare.chart import LineChart, Series, Tick, line_chart, ticks
from offbeat.compare.curves import Point
from offbeat.compare.result import Comparison, Result, Spread
from offbeat.compare.timeline import Timeline

COLOURS = 8  # that the style sheet has


class Tile(NamedTuple):
    """One thing to remember: the best method in some respect."""

    title: str
    value: str
    name: str
    colour: str
    detail: str


class BarRow(NamedTuple):
    """One method's bar; all but the text in per cent of the box."""

    name: str
    colour: str
    text: str
    width: float = 0.0
    low: float = 0.0
    high: float = 0.0
    floor: float | None = None


class BarPanel(NamedTuple):
    """Bars of one quantity."""

    title: str
    subtitle: str
    rows: list[BarRow]


@final
@dataclass(frozen=True)
class Schedule:
    """All timelines on one scale, which ends with the longest step."""

    timelines: Sequence[Timeline]
    seconds: float
    ticks: list[Tick]


def colours(comparison: Comparison) -> dict[str, str]:
    """A colour's class for every method; the floor has its own."""
    names: dict[str, str] = {}
    for result in comparison.results:
        used = sum(colour != "floor" for colour in names.values())
        names[result.name] = "floor" if result.is_floor else f"c{used % COLOURS}"
    return names


def facts(comparison: Comparison) -> list[tuple[str, str]]:
    """The setting in short."""
    setup = comparison.setup
    per_node = sorted(set(setup.ranks_per_node))
    ranks = "1 rank each" if per_node == [1] else f"{'–'.join(map(str, per_node))} ranks each"
    found = [
        ("nodes", f"{len(setup.ranks_per_node)}, {ranks}"),
        ("links", "not shaped" if setup.rate is None else quantity.rate(setup.rate)),
        ("steps", "unknown" if comparison.steps is None else f"{comparison.steps} a run"),
        ("rounds", str(comparison.rounds)),
        ("baseline", comparison.baseline),
    ]
    return found + ([("arguments", " ".join(setup.arguments))] if setup.arguments else [])


def tiles(comparison: Comparison) -> list[Tile]:
    """The fastest step, the first at the target loss, the least sent."""
    baseline = next((r for r in comparison.results if r.is_baseline), None)
    target = comparison.target_loss
    loss = "" if target is None else quantity.loss(target)
    kinds: list[tuple[str, Callable[[Result], Spread | None], Callable[[float], str]]] = [
        ("Fastest step", lambda r: r.seconds_per_step, quantity.seconds),
        (f"First at loss {loss}", lambda r: r.seconds_to_target, quantity.seconds),
        ("Least on the wire", lambda r: r.bytes_per_step, quantity.size),
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
    """Time, bytes and stall of a step."""
    has_floor = any(result.floor for result in comparison.results)
    floor = "; the mark is the floor of time" if has_floor else ""
    return [
        _panel(
            comparison,
            "Time of a step",
            f"median, thin line from the least to the most of all rounds{floor}",
            lambda result: result.seconds_per_step,
            quantity.seconds,
            lambda result: result.floor.median if result.floor else None,
        ),
        _panel(
            comparison,
            "Sent in a step",
            "by all ranks of the busiest node",
            lambda result: result.bytes_per_step,
            quantity.size,
        ),
        _panel(
            comparison,
            "Stalled in a step",
            "time the training loop waited for others",
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
        row = BarRow(name, colours(comparison)[name], "not known")
        if value is not None:
            width, low, high = (round(scale * x, 2) for x in (value.median, value.min, value.max))
            at = None if mark is None else round(scale * mark, 2)
            row = BarRow(name, row.colour, text(value.median), width, low, high, at)
        rows.append(row)
    return BarPanel(title, subtitle, rows)


def loss_chart(comparison: Comparison, x: Callable[[Point], float], unit: str) -> LineChart | None:
    """The losses of all methods over ``x``; the held-out loss alone where there is no other.

    The floor is no method: its replicas part, and their losses would dwarf the others' scale.
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


def schedule(timelines: Sequence[Timeline]) -> Schedule | None:
    """Put all timelines on one scale."""
    if not timelines:
        return None
    longest = max(lane.seconds for timeline in timelines for lane in timeline.lanes)
    marks = [Tick(round(100 * t / longest, 2), f"{t:g} s") for t in ticks(0, longest, 4)]
    return Schedule(timelines, longest, marks)
