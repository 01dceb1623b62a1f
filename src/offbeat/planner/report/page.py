"""The HTML report of a plan: one self-contained file, in the style of ``offbeat compare``."""

import math
from pathlib import Path
from typing import NamedTuple

from offbeat.kit import quantity
from offbeat.kit.chart import Frame, LineChart, Pair, Series, draw
from offbeat.kit.page import Tile, render
from offbeat.plan.recommend import WORDS
from offbeat.plan.result import Plan
from offbeat.planner.question import WinMap
from offbeat.planner.report.table import COLUMNS, UNKNOWN, cells, title

ROOM = "offbeat.planner.report"
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


def write_report(plan: Plan, winners: WinMap, path: Path) -> None:
    """Render the report to ``path``.

    Raises ``ModuleNotFoundError`` without jinja2, ``ValueError`` if the file cannot be written.
    """
    contents = {
        "title": title(plan),
        "plan": plan,
        "colours": _colours(plan),
        "facts": _facts(plan),
        "tiles": _tiles(plan),
        "headings": [column[:2] for column in COLUMNS],
        "rows": [(row.name, cells(row)) for row in plan.of(plan.at)],
        "over_nodes": _nodes_chart(plan),
        "bars": _stacked_bars(plan),
        "map": _map_rows(plan, winners),
        "unknown": UNKNOWN,
    }
    render(ROOM, path, contents)


def _colours(plan: Plan) -> dict[str, str]:
    """Return the CSS class of every method's colour."""
    names = dict.fromkeys(row.name for row in plan.rows)
    return {name: f"c{index % COLOURS}" for index, name in enumerate(names)}


def _facts(plan: Plan) -> list[tuple[str, str]]:
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
        *([("sites", setup.sites)] if setup.sites != "none" else []),
        *([("loss", f"{100 * setup.loss:g} %")] if setup.loss else []),
        *([("connections", str(setup.connections))] if setup.connections > 1 else []),
        ("jitter", setup.jitter),
        ("late steps", setup.late),
        ("slow rank", setup.straggler),
        *(factor if setup.device_factor != 1 else []),
    ]


def _tiles(plan: Plan) -> list[Tile]:
    """Return the method to use, and those with the fewest bytes and the least memory."""
    rows = {row.name: row for row in plan.of(plan.at)}
    sending = [row for row in rows.values() if row.prediction.bytes_per_node > 0]
    kinds = [
        (
            "Use",
            rows[plan.recommended],
            quantity.seconds(rows[plan.recommended].prediction.seconds),
        ),
    ]
    if sending:
        fewest = min(sending, key=lambda row: row.prediction.bytes_per_node)
        least = min(sending, key=lambda row: row.prediction.memory)
        kinds.append(("Fewest bytes", fewest, quantity.size(fewest.prediction.bytes_per_node)))
        kinds.append(("Least memory", least, quantity.size(least.prediction.memory)))
    detail = f"on {plan.at} nodes"
    return [Tile(k, value, row.name, _colours(plan)[row.name], detail) for k, row, value in kinds]


def _nodes_chart(plan: Plan) -> LineChart | None:
    """Plot time per step against nodes, both axes logarithmic; None for one number of nodes."""
    if len(plan.nodes) < 2:
        return None
    points: dict[str, list[Pair]] = {}
    for row in plan.rows:
        pair = math.log10(row.nodes), math.log10(row.prediction.seconds)
        points.setdefault(row.name, []).append(pair)
    values = [y for pairs in points.values() for _, y in pairs]
    left, right = math.log10(plan.nodes[0]), math.log10(plan.nodes[-1])
    margin = 0.04 * (max(values) - min(values)) or 0.1
    frame = Frame(left, right + 0.05 * (right - left), min(values) - margin, max(values) + margin)
    names = _colours(plan)
    lines = draw(
        [Series(name, names[name], pairs, dots=pairs) for name, pairs in points.items()],
        frame,
        lambda pair, _: f"{quantity.seconds(10 ** pair[1])} on {10 ** pair[0]:.0f} nodes",
        lambda y: quantity.seconds(10**y),
        gap=100 / len(points),
    )
    y_ticks = {math.log10(y): f"{y:g} s" for y in _decades(frame.bottom, frame.top)}
    x_ticks = {math.log10(nodes): f"{nodes}" for nodes in plan.nodes}
    return LineChart(lines, frame.x_ticks(x_ticks), frame.y_ticks(y_ticks), None)


def _stacked_bars(plan: Plan) -> list[StackedBar]:
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
        bars.append(StackedBar(row.name, quantity.seconds(row.prediction.seconds), segments))
    return bars


def _map_rows(plan: Plan, winners: WinMap) -> list[tuple[str, list[MapCell]]]:
    """Return the rows of the map, the highest rate first: its text, and a cell for each size."""
    rows = []
    for rate, chosen in reversed(list(zip(winners.rates, winners.winners, strict=True))):
        row = [
            MapCell(name, _colours(plan)[name], quantity.seconds(seconds))
            for name, seconds in chosen
        ]
        rows.append((quantity.rate(int(float(f"{rate:.1g}"))), row))
    return rows


def _decades(bottom: float, top: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten between two logarithms; powers alone if many."""
    powers = range(math.floor(bottom), math.ceil(top) + 1)
    steps = (1, 2, 5) if top - bottom < 2 else (1, 3) if top - bottom < 3 else (1,)
    found = [step * 10.0**power for power in powers for step in steps]
    return [value for value in found if bottom <= math.log10(value) <= top]
