"""Tables on the terminal and in Markdown."""

from collections.abc import Sequence

from rich.table import Table

Row = Sequence[str]


def terminal(title: str, headings: Row, rows: Sequence[Row]) -> Table:
    """A table to print; all columns but the first are aligned right."""
    shown = Table(title=title)
    for number, heading in enumerate(headings):
        shown.add_column(heading, justify="right" if number else "left")
    for row in rows:
        shown.add_row(*row)
    return shown


def markdown(headings: Row, rows: Sequence[Row]) -> str:
    """The same in Markdown."""
    first, *others = (f"| {' | '.join(map(_escaped, line))} |\n" for line in (headings, *rows))
    return "".join([first, "|" + "---|" * len(headings) + "\n", *others])


def _escaped(cell: str) -> str:
    return cell.replace("|", r"\|")
