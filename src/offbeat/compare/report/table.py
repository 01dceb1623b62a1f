"""The table of results in a terminal, and its columns, which the report shares."""

from collections.abc import Callable
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from offbeat.compare.result import Comparison, Result, Spread
from offbeat.kit import quantity
from offbeat.kit.terminal import figures

DASH = "–"


class TableCell(NamedTuple):
    """A formatted number, and a ``detail`` that is shown beside it in small type."""

    text: str
    detail: str = ""


class Column(NamedTuple):
    """One quantity of all methods; ``meaning`` defines it in the report."""

    title: str
    unit: str
    meaning: str
    cell: Callable[[Result], TableCell]


def table(comparison: Comparison, width: int) -> Table:
    """Build a table with one row per method, or one column per method if ``width`` is too small.

    ``width`` is in characters.
    """
    shown = columns(comparison)
    roles = [
        "baseline" if r.is_baseline else "no communication" if r.is_floor else ""
        for r in comparison.results
    ]
    names = [
        _two_lines(r.name, role, "bold") for r, role in zip(comparison.results, roles, strict=True)
    ]
    heads = [_two_lines(column.title, column.unit) for column in shown]
    found = [[column.cell(result) for column in shown] for result in comparison.results]
    cells = [[_two_lines(c.text, c.detail and f"({c.detail})") for c in row] for row in found]
    notes = [f"{result.name}: {result.note}" for result in comparison.results if result.note]
    caption = "\n".join([*notes, *filter(None, [comparison.setup.unshaped])]) or None

    def build(heads: list[Text], names: list[Text], cells: list[list[Text]]) -> Table:
        rows = [[name, *row] for name, row in zip(names, cells, strict=True)]
        return figures(title(comparison), heads, rows, caption)

    wide = build(heads, names, cells)
    if Console(width=10_000).measure(wide).maximum <= width:
        return wide
    return build(names, heads, [list(row) for row in zip(*cells, strict=True)])


def title(comparison: Comparison) -> str:
    """Name the script, the nodes and the rate of their links."""
    setup = comparison.setup
    nodes = len(setup.ranks_per_node)
    ranks = sum(setup.ranks_per_node)
    layout = f"{nodes} nodes" if ranks == nodes else f"{nodes} nodes, {ranks} ranks"
    return f"{setup.script} on {layout}, {setup.links}"


def _two_lines(text: str, detail: str, style: str = "") -> Text:
    return Text.assemble((text, style), (f"\n{detail}" if detail else "", "dim"))


def columns(comparison: Comparison) -> list[Column]:
    """Return all columns; the unit of the time to loss names the target loss."""
    if (target := comparison.target_loss) is None:
        return _COLUMNS
    unit = f"loss {quantity.loss(target)}"
    return [c._replace(unit=unit) if c.unit == "target loss" else c for c in _COLUMNS]


def _time(result: Result) -> TableCell:
    if result.seconds_per_step is None:
        return TableCell(result.state if result.state != "done" else DASH)
    return _spread(result.seconds_per_step, quantity.seconds, result.rounds > 1)


def _faster(result: Result) -> TableCell:
    if result.is_baseline and result.faster:
        return TableCell("1×")
    return _spread(result.faster, quantity.times, False)


def _share(result: Result) -> TableCell:
    if result.share_of_floor is None or result.floor is None:
        return TableCell(DASH)
    share, floor = result.share_of_floor.median, result.floor.median
    return TableCell(quantity.percent(share), quantity.seconds(floor))


def _spread(spread: Spread | None, text: Callable[[float], str], with_range: bool) -> TableCell:
    if spread is None:
        return TableCell(DASH)
    return TableCell(text(spread.median), _range(spread, text) if with_range else "")


def _range(spread: Spread, text: Callable[[float], str]) -> str:
    """Format minimum and maximum, without a unit if both have the same."""
    low, _, unit = text(spread.min).partition(" ")
    high, _, same = text(spread.max).partition(" ")
    return f"{low}–{high}" if unit == same else f"{low} {unit}–{high} {same}"


_COLUMNS = [
    Column(
        "time",
        "per step",
        "Mean over the steps after warm-up, without evaluations, on the slowest rank. Median over "
        "rounds; in small type the minimum and the maximum.",
        _time,
    ),
    Column(
        "faster",
        "than baseline",
        "Time per step of the baseline divided by that of the method, in the same round. Median "
        "over rounds.",
        _faster,
    ),
    Column(
        "floor",
        "÷ time",
        "A lower bound on the time per step, divided by the measured time. The floor, in small "
        "type, is the time of a step without communication, or the time that its bytes and their "
        "TCP headers take on the link, whichever is longer. Computed in each round; median over "
        "rounds.",
        _share,
    ),
    Column(
        "sent",
        "step and node",
        "Bytes that all ranks of the busiest node send per step on the axes world and node. "
        "Collectives count what a ring sends. With several ranks per node, world includes what "
        "stays inside the node. 1 MB is 10⁶ bytes.",
        lambda result: _spread(result.bytes_per_step, quantity.size, False),
    ),
    Column(
        "stalled",
        "per step",
        "Time that the training loop waits for other ranks; mean over ranks. Unknown for "
        "torch-ddp, which waits inside backward.",
        lambda result: _spread(result.stall_per_step, quantity.seconds, False),
    ),
    Column(
        "speed",
        "kept",
        "What all ranks train on in a second, in samples where steps have weights, relative to the "
        "sum of what each rank would without waiting for others. With equal batches a node at half "
        "speed costs the others half of theirs. Unknown for torch-ddp.",
        lambda result: _spread(result.speed_kept, quantity.percent, False),
    ),
    Column(
        "train",
        "loss",
        "Training loss, mean over the last tenth of the steps and over all ranks.",
        lambda result: _spread(result.final_loss, quantity.loss, False),
    ),
    Column(
        "held-out",
        "loss",
        "The last held-out loss that the script reports; mean over ranks.",
        lambda result: _spread(result.heldout_loss, quantity.loss, False),
    ),
    Column(
        "time to",
        "target loss",
        "Training time, without evaluations, until the training loss reaches the target. The loss "
        "is averaged over a tenth of the run. The target is the highest final loss of all "
        "methods, unless --target-loss is given.",
        lambda result: _spread(result.seconds_to_target, quantity.seconds, False),
    ),
    Column(
        "distance",
        "of replicas",
        "Euclidean distance of a replica's parameters from the average of all replicas, just "
        "before finish(); mean over replicas.",
        lambda result: _spread(result.consensus_distance, quantity.distance, False),
    ),
]
