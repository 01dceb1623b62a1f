"""The table of results in a terminal."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from offbeat.compare.report.column import columns
from offbeat.compare.result import Comparison
from offbeat.kit.terminal import figures


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
