"""Waiting time of the other ranks when one is late, by overlap.

One of 4 workers loses its link for 5 s, or gets a quarter of its CPU time. Needs root.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import typer
from rich.progress import track

from bench.harness.bench import Bench
from bench.harness.claim import Claim
from bench.harness.console import console
from bench.harness.report import report
from bench.sgp.regression import RATE, run
from offbeat.lab import Cut, Fault, Straggler

LATE_WORKERS, LATE_STEPS, LATE_NODE = 4, 150, 1
CUT_AT, CUT_SECONDS, SHARE = 8.0, 5.0, 0.25  # ranks take about 5 s to start
OVERLAPS = (0, 1, 4)
CUT, SLOW = f"no link for {CUT_SECONDS:g} s", f"{SHARE:.0%} of its CPU"
BENCH = Bench(
    name="sgp/late",
    claim="Others wait no longer than a rank is late",
    minutes=4,
)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Lateness:
    """Seconds per step of the late node and of the slowest other one."""

    fault: str
    overlap: int
    mean: tuple[float, float]
    longest: tuple[float, float]


def measure(overlap: int) -> list[Lateness]:
    """A run without fault, and one with each fault."""
    faults: dict[str, list[Fault]] = {
        "none": [],
        CUT: [Cut(LATE_NODE, CUT_AT, CUT_AT + CUT_SECONDS)],
        SLOW: [Straggler(LATE_NODE, SHARE)],
    }
    found = []
    for name, fault in faults.items():
        printed = run(LATE_WORKERS, f"sgp(overlap={overlap})", LATE_STEPS, -1, 0, 0, faults=fault)
        steps = {rank: np.diff(worker["times"]) for rank, worker in printed.items()}
        own = steps.pop(LATE_NODE)
        mean = float(own.mean()), max(float(s.mean()) for s in steps.values())
        longest = float(own.max()), max(float(s.max()) for s in steps.values())
        found.append(Lateness(name, overlap, mean, longest))
    return found


def claim(each: Lateness) -> Claim:
    text = f"overlap {each.overlap}, {each.fault}: others wait hardly longer than node 1"
    if each.fault == CUT:  # each connection waits for its own TCP retransmission timer
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
    report(BENCH, title, headings, rows, claims, measured=[*map(asdict, found)])


@app.command(epilog=BENCH.examples())
def main() -> None:
    """Delay a node and measure the delay of the others."""
    show([row for tau in track(OVERLAPS, "late nodes", console=console) for row in measure(tau)])


if __name__ == "__main__":
    app()
