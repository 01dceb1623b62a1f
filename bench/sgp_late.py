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

from offbeat.lab import Cut, Fault, Straggler

LATE_WORKERS, LATE_STEPS, LATE_NODE = 4, 150, 1
CUT_AT, CUT_SECONDS, SHARE = 8.0, 5.0, 0.25  # ranks need some 5 s to start
OVERLAPS = (0, 1, 4)
CUT, SLOW = f"no link for {CUT_SECONDS:g} s", f"{SHARE:.0%} of its CPU"
EPILOG = "Examples: `python bench/sgp_late.py`"
app = typer.Typer(pretty_exceptions_enable=False)
console = Console(highlight=False)


@dataclass(frozen=True)
class Lateness:
    """The steps of one run, in seconds, of the late node and of the slowest other one."""

    fault: str
    overlap: int
    mean: tuple[float, float]
    longest: tuple[float, float]


def late(overlap: int) -> list[Lateness]:
    """A run without fault, and one with each."""
    faults: dict[str, list[Fault]] = {
        "none": [],
        CUT: [Cut(LATE_NODE, CUT_AT, CUT_AT + CUT_SECONDS)],
        SLOW: [Straggler(LATE_NODE, SHARE)],
    }
    found = []
    for name, fault in faults.items():
        said = run(LATE_WORKERS, f"sgp(overlap={overlap})", LATE_STEPS, -1, 0, 0, faults=fault)
        steps = {rank: np.diff(worker["times"]) for rank, worker in said.items()}
        own = steps.pop(LATE_NODE)
        mean = float(own.mean()), max(float(s.mean()) for s in steps.values())
        longest = float(own.max()), max(float(s.max()) for s in steps.values())
        found.append(Lateness(name, overlap, mean, longest))
    return found


def claim(each: Lateness) -> Claim:
    text = f"overlap {each.overlap}, {each.fault}: others are hardly later than node 1"
    if each.fault == CUT:  # all wait until TCP tries again, which each connection times itself
        own, others = each.longest
        return Claim(text, f"at most {1.05 * own:.2f} s", f"{others:.2f} s", others <= 1.05 * own)
    own, others = each.mean
    bound = f"at most {1.05 * own * 1e3:.0f} ms a step"
    return Claim(text, bound, f"{others * 1e3:.0f} ms", others <= 1.05 * own)


def show(found: Sequence[Lateness]) -> None:
    rows = [
        (
            each.fault,
            f"{each.overlap}",
            *(f"{seconds * 1e3:.0f} ms" for seconds in each.mean),
            *(f"{seconds:.2f} s" for seconds in each.longest),
        )
        for each in found
    ]
    claims = [claim(each) for each in found if each.fault != "none"]
    headings = ("node 1 has", "overlap", "its mean step", "others'", "its longest", "others'")
    title = f"{LATE_WORKERS} workers, {LATE_STEPS} steps, {RATE}"
    report("sgp_late", title, headings, rows, claims, lateness=[*map(asdict, found)])


@app.command(epilog=EPILOG)
def main() -> None:
    """Make a node late, and see by how much the others are."""
    show([row for tau in track(OVERLAPS, "late nodes", console=console) for row in late(tau)])


if __name__ == "__main__":
    app()
