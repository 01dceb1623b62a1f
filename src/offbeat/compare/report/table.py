"""The table of results in a terminal."""

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from offbeat.compare import quantity
from offbeat.compare.report.column import TableCell, columns
from offbeat.compare.result import Comparison, Result


def table(comparison: Comparison, width: int) -> Table:
    """Build a table with one row per method, or one column per method if ``width`` is too small.

    ``width`` is in characters.
    """
    names = [_name(result) for result in comparison.results]
    titles = [
        Text.assemble(column.title, (f"\n{column.unit}", "dim")) for column in columns(comparison)
    ]
    cells = [
        [_text(column.cell(result)) for column in columns(comparison)]
        for result in comparison.results
    ]
    wide = _build_table(comparison, titles, names, cells)
    if Console(width=10_000).measure(wide).maximum <= width:
        return wide
    return _build_table(comparison, names, titles, [list(row) for row in zip(*cells, strict=True)])


def title(comparison: Comparison) -> str:
    """Name the script, the nodes and the rate of their links."""
    setup = comparison.setup
    nodes = len(setup.ranks_per_node)
    rate = "no rate limit" if setup.rate is None else quantity.rate(setup.rate)
    ranks = sum(setup.ranks_per_node)
    layout = f"{nodes} nodes" if ranks == nodes else f"{nodes} nodes, {ranks} ranks"
    return f"{setup.script} on {layout}, {rate}"


def _build_table(
    comparison: Comparison, heads: list[Text], names: list[Text], rows: list[list[Text]]
) -> Table:
    caption = "\n".join(_notes(comparison)) or None
    made = Table(
        title=title(comparison), caption=caption, caption_justify="left", box=box.SIMPLE_HEAD
    )
    made.add_column("")
    for head in heads:
        made.add_column(head, justify="right")
    for name, row in zip(names, rows, strict=True):
        made.add_row(name, *row)
    return made


def _name(result: Result) -> Text:
    role = "no communication" if result.is_floor else ""
    role = "baseline" if result.is_baseline else role
    return Text.assemble((result.name, "bold"), (f"\n{role}" if role else "", "dim"))


def _text(cell: TableCell) -> Text:
    return Text.assemble(cell.text, (f"\n({cell.detail})" if cell.detail else "", "dim"))


def _notes(comparison: Comparison) -> list[str]:
    notes = [f"{result.name}: {result.note}" for result in comparison.results if result.note]
    return notes + ([comparison.setup.unshaped] if comparison.setup.unshaped else [])
