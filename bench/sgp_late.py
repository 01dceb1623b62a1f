"""A rank is late: how long the others wait for it, by overlap.

Of 4 workers of `sgp` one loses its link for 5 s, or has a quarter of its time to compute. In the
lab: real processes, a network for each. Needs root.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import typer
from _claims import Claim, report
from _sgp_worker import RATE, run
from rich.console import Console
from rich.progress import track

from offbeat.lab import Cut, Straggler

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


def show(delays: Sequence[Lateness]) -> None:
    rows = [
        (
            each.fault,
            str(each.overlap),
            f"{each.step * 1e3:.0f} ms",
            f"{each.late_node:.2f} s",
            f"{each.others:.2f} s",
        )
        for each in delays
    ]
    claims = [
        Claim(f"others are no later than the node with its {each.fault}, overlap {each.overlap}",
              f"at most {each.late_node:.2f} s", f"{each.others:.2f} s",
              each.others <= each.late_node + 10 * each.step)
        for each in delays
    ]  # fmt: skip
    headings = ("node 1 has its", "overlap", "a step without", "node 1 is late by", "others by")
    title = f"{LATE_WORKERS} workers, {LATE_STEPS} steps, {RATE}"
    report("sgp_late", title, headings, rows, claims, delays=[*map(asdict, delays)])


@app.command(epilog=EPILOG)
def main() -> None:
    """Make a node late, and see by how much the others are."""
    show([row for tau in track(OVERLAPS, "late nodes", console=console) for row in delay(tau)])


if __name__ == "__main__":
    app()
