"""What a benchmark has found: tables on the terminal, a compact result and a raw recording."""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from statistics import median
from typing import Any

from rich.table import Table

from bench.harness import claim, files
from bench.harness.catalogue import Bench
from bench.harness.claim import Claim

KEPT = 3  # a series of at most so many numbers is written as it is
DIGITS, DRAWN_DIGITS = 7, 4  # significant ones: of measurements, of what a picture shows
WIDTH = 160  # columns of a line
Row = Sequence[str]


@dataclass(frozen=True)
class Result:
    """What a benchmark has found.

    ``measured`` is written with series of numbers summarized, and ``picture``, what a picture
    shows, as it is. The raw recording has ``measured`` as it is.
    """

    title: str
    headings: Row
    rows: Sequence[Row]
    claims: Sequence[Claim]
    measured: Any = None
    picture: Any = None

    @classmethod
    def by_case(
        cls, title: str, headings: Row, found: Mapping[Any, Any],
        rows: Callable[..., Iterable[Row]], claims: Callable[..., Iterable[Claim]],
    ) -> "Result":  # fmt: skip
        """The rows and claims of each case and what was found in it, one after the other."""
        lines, judged = (
            [line for case in found.items() for line in made(*case)] for made in (rows, claims)
        )
        return cls(title, headings, lines, judged, found)


def report(bench: Bench, found: Result) -> None:
    """Print a table and the verdict on each claim, and write both as the bench's result."""
    verdicts = [each.row for each in found.claims]
    files.console.print(terminal(found.title, found.headings, found.rows))
    if verdicts:
        files.console.print(terminal("At this scale", claim.HEADINGS, verdicts))
        lines = markdown(claim.HEADINGS, verdicts)
        files.result(bench.name, ".md").write_text(lines, encoding="utf-8")
    about = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": version("torch"),
        "cpu_count": os.cpu_count(),
    }
    shown = {"title": found.title, "headings": found.headings, "rows": found.rows}
    kept = plain(about | shown | {"claims": found.claims})
    if found.measured is not None:
        kept["measured"] = plain(found.measured, DIGITS, is_summarized=True)
    if found.picture is not None:
        kept["picture"] = plain(found.picture, DRAWN_DIGITS)
    files.result(bench.name).write_text(dumps(kept) + "\n", encoding="utf-8")
    recorded = about | {"measured": plain(found.measured)}
    files.raw(bench.name).write_text(json.dumps(recorded) + "\n", encoding="utf-8")
    files.console.print(f"written: {os.path.relpath(files.result(bench.name))}")


def terminal(title: str, headings: Row, rows: Sequence[Row]) -> Table:
    """A table to print; all columns but the first are aligned right."""
    shown = Table(title=title)
    for number, heading in enumerate(headings):
        shown.add_column(heading, justify="right" if number else "left")
    for row in rows:
        shown.add_row(*row)
    return shown


def markdown(headings: Row, rows: Sequence[Row]) -> str:
    escaped = [[cell.replace("|", r"\|") for cell in line] for line in (headings, *rows)]
    first, *others = (f"| {' | '.join(line)} |\n" for line in escaped)
    return "".join([first, "|" + "---|" * len(headings) + "\n", *others])


def plain(value: Any, digits: int | None = None, is_summarized: bool = False) -> Any:
    """The value as JSON allows it: keys are strings, dataclasses are dictionaries.

    Numbers keep so many significant digits, longer series of them become their summary.
    """
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if is_summarized and _is_series(value) and len(value) > KEPT:
        ends = {"min": min(value), "max": max(value), "n": len(value)}
        value = {"median": median(value)} | ends
    if isinstance(value, Mapping):
        return {str(key): plain(each, digits, is_summarized) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each, digits, is_summarized) for each in value]
    if isinstance(value, float) and digits is not None:
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    return value


def _is_series(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(each, int | float) and not isinstance(each, bool) for each in value
    )


def dumps(value: Any, depth: int = 0) -> str:
    """Indented JSON in which a series, and whatever fits on a line, is on one line."""
    flat = json.dumps(value)
    is_short = len(flat) + depth <= WIDTH
    if is_short or not isinstance(value, dict | list) or (_is_series(value) and len(value) > KEPT):
        return flat
    pad, inner = " " * depth, ",\n" + " " * (depth + 1)
    if isinstance(value, dict):
        lines = [f"{json.dumps(key)}: {dumps(each, depth + 1)}" for key, each in value.items()]
    else:
        lines = [dumps(each, depth + 1) for each in value]
    begin, end = "{}" if isinstance(value, dict) else "[]"
    return f"{begin}\n{pad} {inner.join(lines)}\n{pad}{end}"
