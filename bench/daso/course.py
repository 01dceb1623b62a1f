"""The course of a run: quality, loss, distance of the replicas and B, recorded and drawn."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import offbeat
from bench.harness.case import Case, Outcome
from bench.harness.seeds import in_threads

LABELS = ("held out, %", "loss", "distance", "B")


@dataclass
class Course:
    """What is seen in each step; the quality, that of worker 0, after some."""

    losses: Sequence[float] = ()
    distance: list[float] = field(default_factory=list)
    every: list[float] = field(default_factory=list)
    quality: list[tuple[int, float]] = field(default_factory=list)


def follow(case: Case) -> tuple[Outcome, Course]:
    """Train in threads, and look at the replicas after each step."""
    course, heldout = Course(), case.task.data()[1]["heldout"]

    def look(replica: offbeat.Replica, step: int) -> None:
        distance = replica.consensus_distance()["mean"]
        if replica.world.rank == 0:
            course.distance.append(distance)
            course.every.append(replica.stats()["measures"].get("every", 1))
            if step % max(1, case.steps // 15) == 0:
                course.quality.append((step + 1, case.task.score(replica.model, *heldout)))

    outcome = in_threads(case, after=look)
    course.losses = outcome.losses
    return outcome, course


def draw(runs: Mapping[str, Mapping[str, Course]], workers: str, file: Path) -> None:
    """A column for each task, a line for each method."""
    figure = Figure(figsize=(11, 9), layout="constrained")
    grid = figure.subplots(4, len(runs), sharex="col").T
    for column, (task, methods) in zip(grid, runs.items(), strict=True):
        for name, course in methods.items():
            curves(column, name, course)
        steps = max(len(course.losses) for course in methods.values())
        for axes, label in zip(column, LABELS, strict=True):
            axes.set_ylabel(label)
            for start in (0, steps - steps // 20):
                axes.axvspan(start, start + steps // 20, color="0.9")
        column[0].set_title(f"{task}, {workers}; grey: warm-up and cool-down")
        column[0].legend(fontsize="small")
        column[1].set_yscale("log")
        column[-1].set_xlabel("steps")
    figure.savefig(file, dpi=110)


def curves(column: list[Axes], name: str, course: Course) -> None:
    """The loss is a running mean over a fiftieth of the run."""
    window = max(1, len(course.losses) // 50)
    smooth = np.convolve(course.losses, np.ones(window) / window, "valid")
    steps = np.arange(len(course.distance)) + 1
    column[0].plot(*zip(*course.quality, strict=True), label=name)
    column[1].plot(np.arange(len(smooth)) + window, smooth)
    column[2].plot(steps, course.distance, linewidth=0.8)
    column[3].step(steps, course.every, linewidth=0.8)
