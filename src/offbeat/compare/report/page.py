"""The HTML report: one self-contained file, with a light and a dark colour scheme."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from offbeat.compare.report.losses import loss_chart
from offbeat.compare.report.table import columns, title
from offbeat.compare.report.timeline import Timeline
from offbeat.compare.result import Comparison, Result, Spread
from offbeat.kit import quantity
from offbeat.kit.chart import Tick, ticks
from offbeat.kit.page import Tile, render

ROOM = "offbeat.compare.report"
COLOURS = 8  # defined by the style sheet
Values = Callable[[Result], Spread | None]
Text = Callable[[float], str]


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


class TimelineChart(NamedTuple):
    """All timelines on a common axis of ``seconds``, the time of the longest step."""

    timelines: Sequence[Timeline]
    seconds: float
    ticks: list[Tick]


def write_report(comparison: Comparison, timelines: Sequence[Timeline], path: Path) -> None:
    """Render the report to ``path``."""
    names = _colours(comparison)
    contents = {
        "title": title(comparison),
        "comparison": comparison,
        "results": comparison.results,
        "colours": names,
        "facts": _facts(comparison),
        "tiles": _tiles(comparison),
        "columns": columns(comparison),
        "bar_panels": _bar_panels(comparison),
        "over_time": loss_chart(comparison, names, lambda point: point.seconds, "seconds"),
        "over_steps": loss_chart(comparison, names, lambda point: point.step, "steps"),
        "timeline_chart": _timeline_chart(timelines),
    }
    render(ROOM, path, contents)


def _colours(comparison: Comparison) -> dict[str, str]:
    """Return the CSS class of every method's colour; methods without communication share one."""
    names: dict[str, str] = {}
    for result in comparison.results:
        used = sum(colour != "floor" for colour in names.values())
        names[result.name] = "floor" if result.is_floor else f"c{used % COLOURS}"
    return names


def _facts(comparison: Comparison) -> list[tuple[str, str]]:
    """Return the conditions of the comparison as pairs of name and value."""
    setup = comparison.setup
    per_node = sorted(set(setup.ranks_per_node))
    ranks = (
        "1 rank per node" if per_node == [1] else f"{'–'.join(map(str, per_node))} ranks per node"
    )
    found = [
        ("nodes", f"{len(setup.ranks_per_node)}, {ranks}"),
        ("links", setup.links),
        ("steps", "unknown" if comparison.steps is None else f"{comparison.steps} per run"),
        ("rounds", str(comparison.rounds)),
        ("baseline", comparison.baseline),
    ]
    return found + ([("arguments", " ".join(setup.arguments))] if setup.arguments else [])


def _tiles(comparison: Comparison) -> list[Tile]:
    """Return the methods with the fastest step, the shortest time to loss and the fewest bytes."""
    target = comparison.target_loss
    loss = "" if target is None else quantity.loss(target)
    kinds: list[tuple[str, Values, Text]] = [
        ("Fastest step", lambda r: r.seconds_per_step, quantity.seconds),
        (f"Shortest time to loss {loss}", lambda r: r.seconds_to_target, quantity.seconds),
        ("Fewest bytes sent", lambda r: r.bytes_per_step, quantity.size),
    ]
    made = []
    for heading, values, text in kinds:
        found = [(s.median, r) for r in comparison.results if not r.is_floor and (s := values(r))]
        if len(found) < 2:
            continue
        value, best = min(found, key=lambda pair: pair[0])
        base = next((values(r) for r in comparison.results if r.is_baseline), None)
        detail = "the baseline itself"
        if not best.is_baseline:
            detail = f"{text(base.median)} with {comparison.baseline}" if base else ""
        colour = _colours(comparison)[best.name]
        made.append(Tile(heading, text(value), best.name, colour, detail))
    return made


def _bar_panels(comparison: Comparison) -> list[BarPanel]:
    """Return the bars of time, bytes and stall per step."""
    mark = "; mark: floor" if any(result.floor for result in comparison.results) else ""
    ends = f"median over rounds; thin line: minimum to maximum{mark}"
    times = _bars(comparison, lambda r: r.seconds_per_step, quantity.seconds, has_floor=True)
    sizes = _bars(comparison, lambda r: r.bytes_per_step, quantity.size)
    stalls = _bars(comparison, lambda r: r.stall_per_step, quantity.seconds)
    return [
        BarPanel("Time per step", ends, times),
        BarPanel("Bytes sent per step", "all ranks of the busiest node", sizes),
        BarPanel("Stall per step", "time that the training loop waits for other ranks", stalls),
    ]


def _bars(
    comparison: Comparison, values: Values, text: Text, has_floor: bool = False
) -> list[BarRow]:
    known = [s.max for result in comparison.results if (s := values(result))]
    scale = 100 / (max(known, default=0.0) or 1.0)
    rows = []
    for result in comparison.results:
        head, value = (result.name, _colours(comparison)[result.name]), values(result)
        if value is None:
            rows.append(BarRow(*head, "unknown"))
            continue
        width, low, high = (round(scale * x, 2) for x in (value.median, value.min, value.max))
        floor = round(scale * result.floor.median, 2) if has_floor and result.floor else None
        rows.append(BarRow(*head, text(value.median), width, low, high, floor))
    return rows


def _timeline_chart(timelines: Sequence[Timeline]) -> TimelineChart | None:
    """Arrange all timelines on a common time axis; None if there are none."""
    if not timelines:
        return None
    longest = max(track.seconds for timeline in timelines for track in timeline.tracks)
    marks = [Tick(round(100 * t / longest, 2), f"{t:g} s") for t in ticks(0, longest, 4)]
    return TimelineChart(timelines, longest, marks)
