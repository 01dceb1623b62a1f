"""A rank is late: how long the others wait for it, by overlap.

Of 4 workers of `sgp` one loses its link for 5 s, or has a quarter of its time to compute. In the
lab: real processes, a network for each. Needs root.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import typer
from _sgp_worker import RATE, run
from rich.console import Console
from rich.progress import track
from rich.table import Table

from offbeat.lab import Cut, Straggler

RESULTS = Path(__file__).parent / "results" / "sgp_late.json"
LATE_WORKERS, LATE_STEPS, LATE_NODE = 4, 150, 1
CUT_AT, CUT_SECONDS, SHARE = 8.0, 5.0, 0.25  # ranks need some 5 s to start
OVERLAPS = (0, 1, 4)
EPILOG = "Examples: `python bench/sgp_late.py`"
app = typer.Typer(pretty_exceptions_enable=False)
console = Console(highlight=False)


@dataclass(frozen=True)
class Lateness:
    """One run with a late node: how much longer the loops took than without it, in seconds."""

    fault: str
    overlap: int
    step: float  # seconds of an undisturbed step
    late_node: float
    others: float


def delay(overlap: int) -> list[Lateness]:
    """Each fault against a run without."""
    faults = {
        "none": [],
        f"link down for {CUT_SECONDS:g} s": [Cut(LATE_NODE, CUT_AT, CUT_AT + CUT_SECONDS)],
        f"{SHARE:.0%} of the CPU": [Straggler(LATE_NODE, SHARE)],
    }
    took, steps = {}, {}
    for name, fault in faults.items():
        said = run(LATE_WORKERS, f"sgp(overlap={overlap})", LATE_STEPS, -1, 0, 0, faults=fault)
        seconds = {rank: worker["times"][-1] - worker["times"][0] for rank, worker in said.items()}
        late = seconds.pop(LATE_NODE)
        took[name] = late, max(seconds.values())
        steps[name] = float(np.median(np.diff(said[0]["times"])))
    base = took.pop("none")
    return [
        Lateness(name, overlap, steps["none"], late - base[0], others - base[1])
        for name, (late, others) in took.items()
    ]


def show_delays(delays: Sequence[Lateness]) -> None:
    table = Table(
        "node 1 has its", "overlap", "undisturbed step", "node 1 is late by", "the others by",
        title=f"{LATE_WORKERS} workers, {LATE_STEPS} steps, {RATE}",
    )  # fmt: skip
    for each in delays:
        figures = f"{each.step * 1e3:.0f} ms", f"{each.late_node:.2f} s", f"{each.others:.2f} s"
        table.add_row(each.fault, str(each.overlap), *figures)
    console.print(table)


@app.command(epilog=EPILOG)
def main() -> None:
    """Make a node late; print a table and write it as JSON."""
    delays = [row for tau in track(OVERLAPS, "late nodes", console=console) for row in delay(tau)]
    show_delays(delays)
    RESULTS.write_text(json.dumps([*map(asdict, delays)], indent=2) + "\n")


if __name__ == "__main__":
    app()
