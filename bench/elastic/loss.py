"""The loss of runs whose workers are killed, beside undisturbed runs of as many steps.

A step takes a pause of 20 ms; every ten seconds a worker is killed, and starts again after one.
"""

import multiprocessing as mp
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from math import inf
from multiprocessing.context import BaseContext
from statistics import fmean

from bench.elastic.kills import RECIPES, RESOLVER
from bench.elastic.runs import Case, Run, disturb
from bench.harness import GOAL, Bench, Claim, Effect, Result, command, console
from bench.harness.environment import environment

PAUSE, EVERY = 0.02, 10.0  # seconds of a step, between two kills
HEADINGS = ("method", "kills", "steps", "loss", "undisturbed", "factor")
BENCH = Bench(
    name="elastic/loss",
    claim="Runs whose workers are killed reach the loss of undisturbed ones",
    minutes=9,
)
Pair = tuple[Run, Run]  # with kills and without, of as many steps


def pair(context: BaseContext, case: Case) -> Pair:
    """Make a run with kills, and one without."""
    run = disturb(context, case)
    calm = replace(case, every=inf, seconds=0.0, step=0.0, steps=run.steps)
    return run, disturb(context, calm)


def judge(text: str, pairs: Sequence[Pair]) -> tuple[tuple[str, ...], Claim]:
    """One line of the table, and its claim."""
    kills, steps = sum(run.kills for run, _ in pairs), fmean(run.steps for run, _ in pairs)
    losses = [fmean(run.heldout for run in side) for side in zip(*pairs, strict=True)]
    factor = Effect.mean([run.heldout / calm.heldout for run, calm in pairs], "x")
    faults = [run.fault for each in pairs for run in each if run.fault]
    said = "; ".join([str(factor), *faults])
    row = text, f"{kills}", f"{steps:.0f}", *(f"{loss:.4f}" for loss in losses), said
    holds = not faults and factor.size <= 1 + 2 * factor.error
    return row, Claim(f"{text}: the loss after kills", "within noise", said, holds, GOAL)


@command(BENCH, "--seeds 5", seeds="Runs of each recipe.", jobs="At the same time.")
def app(seconds: float = 32.0, seeds: int = 3, jobs: int = 3) -> Result:
    """Compare under each recipe."""
    os.environ |= environment() | RESOLVER
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["bench.elastic.runs", "bench.harness.command"])
    rows, claims, found = [], [], {}
    for text in RECIPES:
        cases = [Case(text, EVERY, seconds, step=PAUSE, seed=seed) for seed in range(seeds)]
        with ThreadPoolExecutor(jobs) as pool:
            found[text] = list(pool.map(partial(pair, context), cases))
        row, claim = judge(text, found[text])
        console.print("  ".join(row), style="dim", markup=False)
        rows.append(row)
        claims.append(claim)
    title = "The loss after kills, beside undisturbed runs of as many steps"
    return Result(title, HEADINGS, rows, claims, found)
