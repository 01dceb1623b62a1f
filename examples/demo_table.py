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
    "MB per step: sent by each node. loss: held-out, at the end. reaches: seconds until the loss "
    "is {last:.3f}, the last one of {baseline}. sooner: the seconds of {baseline} divided by that."
)


@dataclass(frozen=True)
class Row:
    """The figures of one method; None where unknown or not reached.

    ``seconds_to_baseline`` is the time of training until the held-out loss is as low as the
    baseline's last one, interpolated linearly between evaluations, and ``times_sooner`` the
    baseline's seconds divided by it.
    """

    method: str
    steps: int
    seconds_per_step: float | None
    bytes_per_step_and_node: float | None
    seconds: float
    heldout_loss: float
    seconds_to_baseline: float | None
    times_sooner: float | None


def rows(comparison: Comparison) -> list[Row]:
    """Return one row for each method that completed its run."""
    curves = {r.name: r.course.heldout for r in comparison.results if r.course is not None}
    baseline = curves.get(comparison.baseline, ())
    found = []
    for result in comparison.results:
        if curve := curves.get(result.name):
            reached = seconds_to(curve, baseline[-1].loss) if baseline else None
            found.append(
                Row(
                    result.name,
                    curve[-1].step,
                    _median(result.seconds_per_step),
                    _median(result.bytes_per_step),
                    curve[-1].seconds,
                    curve[-1].loss,
                    reached,
                    None if reached is None else baseline[-1].seconds / reached,
                )
            )
    return found


def write_rows(comparison: Comparison, path: Path) -> None:
    """Write the rows as JSON."""
    found = [asdict(row) for row in rows(comparison)]
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def table(comparison: Comparison) -> Table:
    """Return the rows as a table for the console."""
    found, baseline, setup = rows(comparison), comparison.baseline, comparison.setup
    last = next((row.heldout_loss for row in found if row.method == baseline), float("nan"))
    link = "loopback" if setup.rate is None else f"{setup.rate / 1e6:g} Mbit/s"
    title = f"Character GPT, {len(setup.ranks_per_node)} nodes, {link}, about equal seconds"
    caption = NOTES.format(baseline=baseline, last=last)
    made = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, caption_justify="left",
                 padding=0)  # fmt: skip
    made.add_column("method", overflow="fold")
    heads = ("steps", "s per\nstep", "MB per\nstep", "seconds", "loss", "reaches\n" + f"{last:.3f}",
             "times\nsooner")  # fmt: skip
    for head in heads:
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


def _cells(row: Row) -> list[str]:
    size = row.bytes_per_step_and_node
    return [
        str(row.steps),
        _text(row.seconds_per_step, ".3f"),
        _text(None if size is None else size / 1e6, ".2f"),
        _text(row.seconds, ".1f"),
        _text(row.heldout_loss, ".3f"),
        _text(row.seconds_to_baseline, ".1f"),
        _text(row.times_sooner, ".2f"),
    ]


def _text(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _median(spread: Spread | None) -> float | None:
    return None if spread is None else spread.median
