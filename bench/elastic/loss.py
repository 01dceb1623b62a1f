"""Runs whose workers are killed reach the loss of undisturbed ones of as many steps."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from math import inf
from multiprocessing.context import BaseContext
from statistics import fmean, stdev

from bench.elastic.kills import RECIPES
from bench.elastic.runs import Case, Run, disturb, forking
from bench.harness import GOAL, Bench, Claim, Effect, Result, command, console

PAUSE, EVERY = 0.02, 10.0  # seconds of a step, between two kills
HEADINGS = ("method", "kills", "steps", "loss", "undisturbed", "factor")
BENCH = Bench(name="elastic/loss", minutes=9)


def pair(context: BaseContext, case: Case) -> tuple[Run, Run]:
    """A run with kills, and one without, of as many steps."""
    run = disturb(context, case)
    return run, disturb(context, replace(case, every=inf, seconds=0.0, step=0.0, steps=run.steps))


@command(BENCH, "--seeds 5", seeds="Runs of each recipe.", jobs="At the same time.")
def app(seconds: float = 32.0, seeds: int = 3, jobs: int = 3) -> Result:
    """Compare under each recipe."""
    context, rows, claims, found = forking(), [], [], {}
    for text in RECIPES:
        cases = [Case(text, EVERY, seconds, step=PAUSE, seed=seed) for seed in range(seeds)]
        with ThreadPoolExecutor(jobs) as pool:
            pairs = found[text] = list(pool.map(partial(pair, context), cases))
        killed, calm = zip(*pairs, strict=True)
        kills, steps = sum(run.kills for run in killed), fmean(run.steps for run in killed)
        losses = [f"{fmean(run.heldout for run in runs):.4f}" for runs in (killed, calm)]
        factor = Effect.mean([run.heldout / other.heldout for run, other in pairs], "x")
        faults = [run.fault for run in (*killed, *calm) if run.fault]
        said = "; ".join([str(factor), *faults])
        rows.append((text, f"{kills}", f"{steps:.0f}", *losses, said))
        console.print("  ".join(rows[-1]), style="dim", markup=False)
        # Fewer workers see less data in as many steps: what runs differ by without kills is noise.
        noise = 2 * stdev(run.heldout for run in calm) / fmean(run.heldout for run in calm)
        goal, holds = f"at most {1 + noise:.3f} x", not faults and factor.size <= 1 + noise
        claims.append(Claim(f"{text}: the loss after kills", goal, said, holds, GOAL))
    title = "The loss after kills, beside undisturbed runs of as many steps"
    return Result(title, HEADINGS, rows, claims, found)
