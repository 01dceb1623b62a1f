"""Workers that are killed and started again join a run that goes on.

Gossip under random kills and joins: six processes, some of which die and come back. The loss, the
agreement at the end, what the ranks say about who came and went, and how long the others wait when
one joins.
"""

import multiprocessing as mp
from math import inf
from statistics import median

from bench.harness import GOAL, Bench, Claim, Result, command
from bench.harness.growth import sweep
from bench.scale.churn import Run, churn
from bench.scale.worker import PATIENCE

HEADINGS = (
    "seed", "steps", "killed", "returned", "new", "given up", "lost", "joined", "hung", "agree",
    "told", "loss", "a step()", "of a join",
)  # fmt: skip
LATE = PATIENCE["BROKEN_AFTER"]  # seconds: a join should cost less than a loss
BENCH = Bench(name="scale/elastic", minutes=6, full_minutes=130)


def row(run: Run) -> tuple[str, ...]:
    counts = run.returned, run.new, run.given_up, len(run.lost), len(run.joined)
    stalls = f"{median(run.stalls):.2f}, at most {max(run.stalls):.2f} s" if run.stalls else "-"
    return (
        f"{run.seed}", f"{run.steps:,}", f"{len(run.killed)}", *map(str, counts),
        "; ".join(run.hung) or "none",
        *("yes" if holds else "NO" for holds in (run.is_agreed, run.is_told)),
        f"{run.losses[0]:.3g} to {run.losses[-1]:.3g}" if run.losses else "-",
        f"{1000 * run.step:.1f} ms", stalls,
    )  # fmt: skip


def falls(run: Run) -> bool:
    """Whether the loss has fallen in each third of the run."""
    points = run.losses[::3]  # the 1st, 4th, 7th and 10th tenth
    return bool(points) and points == sorted(points, reverse=True)


@command(
    BENCH, "--full", "--seeds 3 --seconds 60", full={"seeds": 20, "seconds": 300.0},
    seeds="Number of runs.", seconds="Of kills and joins.", workers="Of each run.",
)  # fmt: skip
def app(seeds: int = 3, seconds: float = 60.0, workers: int = 6) -> Result:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["bench.scale.churn"])
    runs = sweep([(context, seed + 1, seconds, workers) for seed in range(seeds)], churn, row)
    claims = []
    for text, holds in (
        ("no call hangs, and no worker ends by itself", [not run.hung for run in runs]),
        ("all models are equal after finish()", [run.is_agreed for run in runs]),
        ("the loss falls in each third of the run", [falls(run) for run in runs]),
        ("stats() lists all who came and went", [run.is_told for run in runs]),
    ):
        every, ours = (f"{count} of {len(runs)} runs" for count in (len(runs), sum(holds)))
        claims.append(Claim(text, every, ours, all(holds)))
    # A rank that joins makes the others late: all of them connect anew, and one shares.
    stalls = [seconds for run in runs for seconds in run.stalls]
    steps = [seconds / run.step for run in runs for seconds in run.stalls]
    most, usual = max(stalls, default=inf), median(steps or [inf])
    text = f"the longest step() around an admission, {len(stalls)} of them"
    ours = f"{most:.2f} s; the median is {usual:.0f} median steps"
    claims.append(Claim(text, f"less than a loss, {LATE:.0f} s", ours, most < LATE, GOAL))
    title = f"{workers} workers of sgp(overlap=1), kills and joins for {seconds:.0f} s"
    return Result(title, HEADINGS, [*map(row, runs)], claims, runs)
