"""Reporting a benchmark: tables on the terminal, a compact result and a raw recording."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from bench.harness import claim, files
from bench.harness.bench import Bench
from bench.harness.claim import Claim
from bench.harness.compact import DIGITS, DRAWN_DIGITS, dumps, plain
from bench.harness.console import console
from bench.harness.table import Row, markdown, terminal


def report(
    bench: Bench,
    title: str,
    headings: Row,
    rows: Sequence[Row],
    claims: Sequence[Claim],
    *,
    measured: Any = None,
    picture: Any = None,
    raw: Any = None,
) -> None:
    """Print a table and the verdict on each claim, and write both as the bench's result.

    ``measured`` is written to the result too, with series of numbers summarized, and ``picture``,
    what a picture shows, as it is. The raw recording has ``measured`` and ``raw`` as they are.
    """
    verdicts = [each.row for each in claims]
    console.print(terminal(title, headings, rows))
    if claims:
        console.print(terminal("At this scale", claim.HEADINGS, verdicts))
    about = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": version("torch"),
        "cpu_count": os.cpu_count(),
    }
    result = about | {"title": title, "headings": list(headings), "rows": [*map(list, rows)]}
    result["claims"] = [asdict(each) for each in claims]
    write(bench, result, measured, picture)
    recorded = about | {"measured": plain(measured), "raw": plain(raw)}
    files.raw(bench.name).write_text(json.dumps(recorded) + "\n", encoding="utf-8")
    console.print(f"written: {os.path.relpath(files.result(bench.name))}")


def write(bench: Bench, result: dict[str, Any], measured: Any, picture: Any) -> None:
    """Write the result as JSON, and its verdicts as Markdown."""
    if measured is not None:
        result = result | {"measured": plain(measured, DIGITS, is_summarized=True)}
    if picture is not None:
        result = result | {"picture": plain(picture, DRAWN_DIGITS)}
    files.result(bench.name).write_text(dumps(result) + "\n", encoding="utf-8")
    if verdicts := [Claim(**each).row for each in result["claims"]]:
        table = markdown(claim.HEADINGS, verdicts)
        files.result(bench.name, ".md").write_text(table, encoding="utf-8")
