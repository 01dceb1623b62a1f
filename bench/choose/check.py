"""One cell in four of choose/sooner for real: all tasks on one of its links, in processes."""

import os
from dataclasses import replace
from functools import partial
from math import ceil
from statistics import median

import offbeat
from bench.choose.runs import METHODS, Runs, Tuned
from bench.choose.tasks import LOOK, MOST, TASKS, WORKERS, constant
from bench.harness import GOAL, NEAR, Bench, Result, at_most, command
from bench.harness.case import Case, Data
from bench.harness.seeds import in_lab

RATE, LINK, OFF = "100mbit", "100 Mbit/s", 25.0  # OFF: %, of a plan
HEADINGS = ("task", "recipe", "steps", "a step", "planned", "sooner", "planned", "loss over ddp's")
BENCH = Bench(name="choose/check", minutes=10)


def data(name: str) -> Data:
    """The same for processes, which are told the name of the task."""
    return next(task for task in TASKS if task.name == name).data()


def case(tuned: Tuned, recipe: str) -> Case:
    """A run of as many steps as were needed in threads, up to the next look."""
    steps = LOOK * ceil(min(tuned.steps(recipe), MOST) / LOOK)
    algorithm, rate = offbeat.algorithm(recipe), tuned.rates[recipe]
    task = replace(tuned.task, data=partial(data, tuned.task.name))
    return Case(recipe, task, algorithm, WORKERS, steps, rate, constant, consensus=True)


def shared(runs: Runs) -> Runs:
    """The same where workers share the cores of this machine, rather than have one each."""
    each = max(1.0, WORKERS / (os.cpu_count() or 1))
    alone = {name: [each * part for part in parts] for name, parts in runs.alone.items()}
    return replace(runs, alone=alone)


@command(BENCH, "--tasks digits", tasks="Which are trained.")
def app(tasks: str = ",".join(task.name for task in TASKS)) -> Result:
    """Train tasks under every method, at the recorded rates, for the recorded steps."""
    runs, rows, errors, over, outcomes = Runs.read(1), [], [], [], {}
    for task in (task for task in TASKS if task.name in tasks.split(",")):
        tuned, seconds = runs.of(task), shared(runs).of(task).seconds
        cases = [case(tuned, tuned.recipe(method, LINK)) for method in METHODS]
        found = [*zip(cases, in_lab(cases, RATE), strict=True)]
        first, ddp = found[0]
        for each, outcome in found:
            planned = seconds[each.name, LINK]
            sooner = first.steps * ddp.seconds / (each.steps * outcome.seconds)
            predicted = first.steps * seconds[first.name, LINK] / (each.steps * planned)
            errors.append(100 * abs(planned / outcome.seconds - 1))
            over.append(100 * (outcome.heldout / tuned.targets[0] - 1))
            outcomes[f"{task.name}, {each.name}"] = outcome
            rows.append((
                task.name, each.name, f"{each.steps}",
                *(f"{1e3 * s:.1f} ms" for s in (outcome.seconds, planned)),
                *(f"{factor:.2f} x" for factor in (sooner, predicted)), f"{over[-1]:+.1f} %",
            ))  # fmt: skip
    claims = [
        at_most("losses over that of ddp in threads", max(over), NEAR, "{:.1f} %", source=GOAL),
        at_most("a step differs from its plan, in the median", median(errors), OFF, "{:.0f} %",
                f"(at most {max(errors):.0f} %)", source=GOAL),
    ]  # fmt: skip
    title = f"{WORKERS} processes on {os.cpu_count()} cores, {LINK}"
    return Result(title, HEADINGS, rows, claims, outcomes)
