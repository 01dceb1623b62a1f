"""The table of the demo, as text and as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from rich import box
from rich.table import Table

from offbeat.compare import Comparison, Spread
from offbeat.compare.curves import Point

NOTES = (
    "loss: held-out, at the end. MB per step: sent by each node. {baseline} by then: the loss of "
    "{baseline} after the same seconds. s to: seconds until the loss is {last:.3f}, the last one "
    "of {baseline}, or {common:.3f}, the highest last one."
)


@dataclass(frozen=True)
class Row:
    """The figures of one method; None where unknown or not reached.

    ``seconds_to_baseline`` is the time of training until the held-out loss is as low as the
    baseline's last one, ``seconds_to_common`` until it is as low as the highest last one of all
    methods. Both are interpolated linearly between evaluations.
    """

    method: str
    seconds_per_step: float | None
    times_baseline: float | None
    bytes_per_step_and_node: float | None
    heldout_loss: float
    seconds: float
    baseline_loss_by_then: float | None
    seconds_to_baseline: float | None
    seconds_to_common: float | None


def rows(comparison: Comparison) -> list[Row]:
    """Return one row for each method that completed its run."""
    curves = {r.name: r.course.heldout for r in comparison.results if r.course is not None}
    common = max(curve[-1].loss for curve in curves.values())
    baseline = curves.get(comparison.baseline, ())
    return [
        Row(
            result.name,
            _median(result.seconds_per_step),
            _median(result.faster),
            _median(result.bytes_per_step),
            curve[-1].loss,
            curve[-1].seconds,
            loss_at(baseline, curve[-1].seconds),
            seconds_to(curve, baseline[-1].loss) if baseline else None,
            seconds_to(curve, common),
        )
        for result in comparison.results
        if (curve := curves.get(result.name))
    ]


def write_rows(comparison: Comparison, path: Path) -> None:
    """Write the rows as JSON."""
    found = [asdict(row) for row in rows(comparison)]
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def table(comparison: Comparison) -> Table:
    """Return the rows as a table for the console."""
    found = rows(comparison)
    common = max(row.heldout_loss for row in found)
    baseline, setup = comparison.baseline, comparison.setup
    last = next((row.heldout_loss for row in found if row.method == baseline), common)
    link = "loopback" if setup.rate is None else f"{setup.rate / 1e6:g} Mbit/s"
    title = f"Character GPT, {len(setup.ranks_per_node)} nodes, {link}, {comparison.steps} steps"
    caption = NOTES.format(baseline=baseline, last=last, common=common)
    made = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, caption_justify="left",
                 padding=0)  # fmt: skip
    made.add_column("method", overflow="fold")
    for head in ("s per\nstep", f"× {baseline}", "MB per\nstep", "loss", "seconds",
                 f"{baseline}\nby then", f"s to\n{last:.3f}", f"s to\n{common:.3f}",
                 ):  # fmt: skip
        made.add_column(head, justify="right")
    for row in found:
        made.add_row(row.method, *_cells(row))
    return made


def seconds_to(curve: Sequence[Point], loss: float) -> float | None:
    """Return when the curve first is as low as ``loss``; None if it never is."""
    for before, after in pairwise(curve):
        if after.loss <= loss:
            share = (before.loss - loss) / (before.loss - after.loss)
            return before.seconds + share * (after.seconds - before.seconds)
    return None


def loss_at(curve: Sequence[Point], seconds: float) -> float | None:
    """Return the loss at this time; None after the end of the curve."""
    for before, after in pairwise(curve):
        if before.seconds <= seconds <= after.seconds:
            share = (seconds - before.seconds) / (after.seconds - before.seconds)
            return before.loss + share * (after.loss - before.loss)
    return None


def _cells(row: Row) -> list[str]:
    size = row.bytes_per_step_and_node
    return [
        _text(row.seconds_per_step, ".3f"),
        _text(row.times_baseline, ".2f"),
        _text(None if size is None else size / 1e6, ".2f"),
        _text(row.heldout_loss, ".3f"),
        _text(row.seconds, ".1f"),
        _text(row.baseline_loss_by_then, ".3f"),
        _text(row.seconds_to_baseline, ".1f"),
        _text(row.seconds_to_common, ".1f"),
    ]


def _text(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _median(spread: Spread | None) -> float | None:
    return None if spread is None else spread.median
