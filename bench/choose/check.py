"""One cell in four of choose/sooner for real: processes on emulated nodes train until the loss."""

import os
from dataclasses import replace
from math import ceil
from statistics import median

import offbeat
from bench.choose.runs import METHODS, Runs, Tuned
from bench.choose.tasks import LOOK, MOST, TASKS, WORKERS, constant
from bench.harness import GOAL, NEAR, Bench, Result, command
from bench.harness.bounds import at_most
from bench.harness.case import Case, Data
from bench.harness.seeds import in_lab

RATE, LINK, OFF = "100mbit", "100 Mbit/s", 25.0  # OFF: %, of a plan
HEADINGS = ("recipe", "steps", "a step", "planned", "sooner", "planned", "loss over ddp's")
BENCH = Bench(
    name="choose/check", claim="Real processes reach the loss of ddp as soon as is predicted",
    minutes=4,
)  # fmt: skip


def data() -> Data:
    """The same for processes, which are told its name."""
    return TASKS[0].data()


def case(tuned: Tuned, recipe: str) -> Case:
    """A run of as many steps as were needed in threads, up to the next look."""
    steps = LOOK * ceil(min(tuned.steps(recipe), MOST) / LOOK)
    algorithm, rate = offbeat.algorithm(recipe), tuned.rates[recipe]
    task = replace(tuned.task, data=data)
    return Case(recipe, task, algorithm, WORKERS, steps, rate, constant, consensus=True)


def shared(runs: Runs) -> Runs:
    """The same where workers share the cores of this machine, rather than have one each."""
    each = max(1.0, WORKERS / (os.cpu_count() or 1))
    alone = {name: [each * part for part in parts] for name, parts in runs.alone.items()}
    return replace(runs, alone=alone)


@command(BENCH)
def app() -> Result:
    """Train the first task under every method, at the recorded rates, for the recorded steps."""
    runs, task = Runs.read(1), TASKS[0]
    tuned, seconds = runs.of(task), shared(runs).of(task).seconds
    target = tuned.targets[0]
    cases = [case(tuned, tuned.recipe(method, LINK)) for method in METHODS]
    rows, errors, over = [], [], []
    found = [*zip(cases, in_lab(cases, RATE), strict=True)]
    first, ddp = found[0]
    for each, outcome in found:
        planned = seconds[each.name, LINK]
        sooner = first.steps * ddp.seconds / (each.steps * outcome.seconds)
        predicted = first.steps * seconds[first.name, LINK] / (each.steps * planned)
        errors.append(100 * abs(planned / outcome.seconds - 1))
        over.append(100 * (outcome.heldout / target - 1))
        rows.append((
            each.name, f"{each.steps}", *(f"{1e3 * s:.1f} ms" for s in (outcome.seconds, planned)),
            *(f"{factor:.2f} x" for factor in (sooner, predicted)), f"{over[-1]:+.1f} %",
        ))  # fmt: skip
    claims = [
        at_most("losses over that of ddp in threads", max(over), NEAR, "{:.1f} %", source=GOAL),
        at_most("a step differs from its plan, in the median", median(errors), OFF, "{:.0f} %",
                f"(at most {max(errors):.0f} %)", source=GOAL),
    ]  # fmt: skip
    title = f"{task.name}, {WORKERS} processes on {os.cpu_count()} cores, {LINK}"
    return Result(title, HEADINGS, rows, claims, {each.name: outcome for each, outcome in found})
