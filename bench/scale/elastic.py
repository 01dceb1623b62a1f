"""Gossip under random kills and joins: six processes, some of which die and come back.

The loss, the agreement at the end, what the ranks say about who came and went, and how long the
others wait when one joins.
"""

import multiprocessing as mp
from collections.abc import Sequence
from math import inf
from statistics import median
from typing import Annotated

import typer

from bench.harness.bench import Bench
from bench.harness.claim import GOAL, Claim
from bench.harness.console import console
from bench.harness.report import report
from bench.scale.churn import Run, churn
from bench.scale.worker import PATIENCE

HEADINGS = (
    "seed", "steps", "killed", "returned", "new", "given up", "lost", "joined", "hung", "agree",
    "told", "loss", "a step()", "of a join",
)  # fmt: skip
LATE = PATIENCE["BROKEN_AFTER"]  # seconds: a join should cost less than a loss
BENCH = Bench(
    name="scale/elastic",
    claim="Workers that are killed and started again join a run that goes on",
    minutes=6,
    full_minutes=130,
)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def row(run: Run) -> tuple[str, ...]:
    loss = f"{run.losses[0]:.3g} to {run.losses[-1]:.3g}" if run.losses else "-"
    return (
        f"{run.seed}",
        f"{run.steps:,}",
        f"{len(run.killed)}",
        f"{run.returned}",
        f"{run.new}",
        f"{run.given_up}",
        f"{len(run.lost)}",
        f"{len(run.joined)}",
        "; ".join(run.hung) or "none",
        "yes" if run.is_agreed else "NO",
        "yes" if run.is_told else "NO",
        loss,
        f"{1000 * run.step:.1f} ms",
        f"{median(run.stalls):.2f}, at most {max(run.stalls):.2f} s" if run.stalls else "-",
    )


def falls(run: Run) -> bool:
    """Whether the loss has fallen in each third of the run."""
    points = run.losses[::3]  # the 1st, 4th, 7th and 10th tenth
    return bool(points) and points == sorted(points, reverse=True)


def claims(runs: Sequence[Run]) -> list[Claim]:
    every = f"{len(runs)} of {len(runs)} runs"
    counts = (
        ("no call hangs, and no worker ends by itself", [not run.hung for run in runs]),
        ("all models are equal after finish()", [run.is_agreed for run in runs]),
        ("the loss falls in each third of the run", [falls(run) for run in runs]),
        ("stats() lists all who came and went", [run.is_told for run in runs]),
    )
    return [
        *(
            Claim(text, every, f"{sum(holds)} of {len(holds)} runs", all(holds))
            for text, holds in counts
        ),
        stall(runs),
    ]


def stall(runs: Sequence[Run]) -> Claim:
    """How late a rank that joins makes the others: all of them connect anew, and one shares."""
    found = [(seconds, seconds / run.step) for run in runs for seconds in run.stalls]
    longest = max((seconds for seconds, _ in found), default=inf)
    usual = median(times for _, times in found) if found else inf
    return Claim(
        f"the longest step() around an admission, {len(found)} of them",
        f"less than a loss, {LATE:.0f} s",
        f"{longest:.2f} s; the median is {usual:.0f} median steps",
        longest < LATE,
        GOAL,
    )


@app.command(epilog=BENCH.examples("--full", "--seeds 3 --seconds 60"))
def main(
    seeds: Annotated[int, typer.Option("--seeds", help="Number of runs.")] = 3,
    seconds: Annotated[float, typer.Option("--seconds", help="Of kills and joins.")] = 60.0,
    workers: Annotated[int, typer.Option("--workers", help="Of each run.")] = 6,
    full: Annotated[bool, typer.Option("--full", help="20 seeds of 5 minutes.")] = False,
) -> None:
    """Kill and start workers at random for some time, then let all finish; once for each seed."""
    count, length = (20, 300.0) if full else (seeds, seconds)
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["bench.scale.churn"])
    runs = []
    for seed in range(1, count + 1):
        console.print(f"seed {seed} of {count}: {workers} workers, {length:.0f} s")
        runs.append(churn(context, seed, length, workers))
        console.print("  ".join(row(runs[-1])))
    title = f"{workers} workers of sgp(overlap=1), kills and joins for {length:.0f} s"
    report(BENCH, title, HEADINGS, [*map(row, runs)], claims(runs), measured=runs)


if __name__ == "__main__":
    app()
