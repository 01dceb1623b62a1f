"""The contents of a plan's report, as plain data for its template."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from offbeat.compare import quantity
from offbeat.compare.report.chart import Frame, Line, LineChart, Mark, Pair, Tick, separate_labels
from offbeat.compare.report.page import Tile
from offbeat.plan.question import WinMap
from offbeat.plan.recommend import WORDS
from offbeat.plan.result import Plan, Row

COLOURS = 14  # defined by the style sheets


class BarSegment(NamedTuple):
    """A part of a step: its name, its width in per cent, and its tooltip."""

    kind: str
    width: float
    text: str


class StackedBar(NamedTuple):
    """Where a method's step goes."""

    name: str
    text: str
    segments: list[BarSegment]


class MapCell(NamedTuple):
    """The method chosen for a number of nodes at a rate."""

    name: str
    colour: str
    text: str


def colours(plan: Plan) -> dict[str, str]:
    """Return the CSS class of every method's colour."""
    names = dict.fromkeys(row.name for row in plan.rows)
    return {name: f"c{index % COLOURS}" for index, name in enumerate(names)}


def facts(plan: Plan) -> list[tuple[str, str]]:
    """Return the conditions of the plan as pairs of name and value."""
    setup = plan.setup
    duplex = "" if setup.full_duplex else ", one direction at a time"
    memory = [] if setup.memory is None else [("memory alone", quantity.size(setup.memory))]
    inside = [("inside a node", quantity.rate(int(setup.inside_rate)))]
    factor = [("device", quantity.times(setup.device_factor))]
    return [
        ("parameters", f"{setup.numel / 1e6:.1f} M, {quantity.size(setup.nbytes)}"),
        ("step alone", quantity.seconds(setup.compute)),
        *memory,
        ("ranks per node", str(setup.ranks_per_node)),
        ("links", f"{quantity.rate(int(setup.rate))}{duplex}"),
        *(inside if setup.ranks_per_node > 1 else []),
        ("latency", quantity.seconds(setup.latency)),
        ("jitter", setup.jitter),
        ("late steps", setup.late),
        *(factor if setup.device_factor != 1 else []),
    ]


def tiles(plan: Plan) -> list[Tile]:
    """Return the method to use, and those with the fewest bytes and the least memory."""
    rows = {row.name: row for row in plan.of(plan.at)}
    sending = [row for row in rows.values() if row.prediction.bytes_per_node > 0]
    kinds = [
        ("Use", rows[plan.recommended], quantity.seconds(_seconds(rows[plan.recommended]))),
    ]
    if sending:
        fewest = min(sending, key=lambda row: row.prediction.bytes_per_node)
        least = min(sending, key=lambda row: row.prediction.memory)
        kinds.append(("Fewest bytes", fewest, quantity.size(fewest.prediction.bytes_per_node)))
        kinds.append(("Least memory", least, quantity.size(least.prediction.memory)))
    detail = f"on {plan.at} nodes"
    return [Tile(k, value, row.name, colours(plan)[row.name], detail) for k, row, value in kinds]


def nodes_chart(plan: Plan) -> LineChart | None:
    """Plot time per step against nodes, both axes logarithmic; None for one number of nodes."""
    if len(plan.nodes) < 2:
        return None
    points: dict[str, list[Pair]] = {}
    for row in plan.rows:
        pair = math.log10(row.nodes), math.log10(_seconds(row))
        points.setdefault(row.name, []).append(pair)
    values = [y for pairs in points.values() for _, y in pairs]
    left, right = math.log10(plan.nodes[0]), math.log10(plan.nodes[-1])
    margin = 0.04 * (max(values) - min(values)) or 0.1
    frame = Frame(left, right + 0.05 * (right - left), min(values) - margin, max(values) + margin)
    tops = separate_labels(
        [frame.to_percent(pairs[-1])[1] for pairs in points.values()], gap=100 / len(points)
    )
    lines = [
        _line(name, pairs, top, frame, colours(plan)[name])
        for (name, pairs), top in zip(points.items(), tops, strict=True)
    ]
    x_ticks = [Tick(frame.to_percent((math.log10(n), 0.0))[0], f"{n}") for n in plan.nodes]
    y_ticks = [
        Tick(frame.to_percent((left, math.log10(y)))[1], f"{y:g} s")
        for y in _decades(frame.bottom, frame.top)
    ]
    return LineChart(tuple(lines), tuple(x_ticks), tuple(y_ticks), None)


def stacked_bars(plan: Plan) -> list[StackedBar]:
    """Return where the step of every method goes, for the size that is shown in detail."""
    bars = []
    for row in plan.of(plan.at):
        parts, total = vars(row.prediction.parts), sum(vars(row.prediction.parts).values())
        segments = [
            BarSegment(
                kind, round(100 * part / total, 2), f"{WORDS[kind]}: {quantity.seconds(part)}"
            )
            for kind, part in parts.items()
        ]
        bars.append(StackedBar(row.name, quantity.seconds(_seconds(row)), segments))
    return bars


def map_rows(plan: Plan, winners: WinMap) -> list[tuple[str, list[MapCell]]]:
    """Return the rows of the map, the highest rate first: its text, and a cell for each size."""
    rows = []
    for rate, chosen in reversed(list(zip(winners.rates, winners.winners, strict=True))):
        row = [
            MapCell(name, colours(plan)[name], quantity.seconds(seconds))
            for name, seconds in chosen
        ]
        rows.append((quantity.rate(int(float(f"{rate:.1g}"))), row))
    return rows


def _line(name: str, pairs: Sequence[Pair], top: float, frame: Frame, colour: str) -> Line:
    def mark(pair: Pair) -> Mark:
        seconds = quantity.seconds(10 ** pair[1])
        return Mark(*frame.to_percent(pair), f"{name}: {seconds} on {10 ** pair[0]:.0f} nodes")

    end = mark(pairs[-1])
    return Line(
        name=name,
        colour=colour,
        path=frame.path(pairs),
        faint="",
        lead=f"M{end.left} {end.top}L96 {end.top}L100 {top:.2f}",
        dots=tuple(map(mark, pairs)),
        end=end,
        label_top=round(top, 2),
        label=quantity.seconds(10 ** pairs[-1][1]),
    )


def _decades(bottom: float, top: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten between two logarithms; powers alone if many."""
    powers = range(math.floor(bottom), math.ceil(top) + 1)
    steps = (1, 2, 5) if top - bottom < 2 else (1, 3) if top - bottom < 3 else (1,)
    found = [step * 10.0**power for power in powers for step in steps]
    return [value for value in found if bottom <= math.log10(value) <= top]


def _seconds(row: Row) -> float:
    return row.prediction.seconds
