"""How a bench reports: the paper's figures beside ours, what holds here, and all of it as files."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
VERDICT = ("claim", "paper or goal", "ours", "holds")
Row = Sequence[str]


@dataclass(frozen=True)
class Claim:
    """What a paper says, in its figures and in ours, and whether ours say so too."""

    text: str
    paper: str
    ours: str
    holds: bool


def report(
    name: str, title: str, headings: Row, rows: Sequence[Row], claims: Sequence[Claim], **more: Any
) -> None:
    """Print a table and a verdict on each claim; write both, and ``more``, to ``name``.json.

    The verdicts go to ``name``.md too, which the documentation includes.
    """
    console = Console(highlight=False)
    console.print(table(title, headings, rows))
    verdicts = [(c.text, c.paper, c.ours, "yes" if c.holds else "NO") for c in claims]
    console.print(table("At this scale", VERDICT, verdicts))
    about = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "cpu_count": os.cpu_count(),
    }
    content = {"headings": list(headings), "rows": [list(row) for row in rows]}
    result = about | content | {"claims": [asdict(claim) for claim in claims]} | more
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(markdown(VERDICT, verdicts), encoding="utf-8")
    console.print(f"written: {os.path.relpath(path)}")


def table(title: str, headings: Row, rows: Sequence[Row]) -> Table:
    shown = Table(title=title)
    for number, heading in enumerate(headings):
        shown.add_column(heading, justify="right" if number else "left")
    for row in rows:
        shown.add_row(*row)
    return shown


def markdown(headings: Row, rows: Sequence[Row]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
