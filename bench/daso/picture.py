"""A picture of the course of runs: quality, loss, distance of replicas and B."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.daso.task import Outcome, Task

Runs = Mapping[Task, Mapping[str, Outcome]]  # by method


def draw(runs: Runs, workers: str, file: Path) -> None:
    """A column for each task: quality, loss, distance of the replicas and B over a run."""
    figure = Figure(figsize=(11, 9), layout="constrained")
    grid = figure.subplots(4, len(runs), sharex="col").T
    for column, (task, methods) in zip(grid, runs.items(), strict=True):
        for name, outcome in methods.items():
            curves(column, name, outcome)
        steps = max(len(outcome.losses) for outcome in methods.values())
        for axes, label in zip(column, (task.quality, "loss", "distance", "B"), strict=True):
            axes.set_ylabel(label)
            for start in (0, steps - steps // 20):
                axes.axvspan(start, start + steps // 20, color="0.9")
        column[0].set_title(f"{task.name}, {workers}; grey: warm-up and cool-down")
        column[0].legend(fontsize="small")
        column[1].set_yscale("log")
        column[-1].set_xlabel("steps")
    file.parent.mkdir(exist_ok=True)
    figure.savefig(file, dpi=110)


def curves(column: list[Axes], name: str, outcome: Outcome) -> None:
    """The loss is a running mean over a fiftieth of the run."""
    course, window = outcome.course, max(1, len(outcome.losses) // 50)
    smooth = np.convolve(outcome.losses, np.ones(window) / window, "valid")
    steps = np.arange(len(course.distance)) + 1
    column[0].plot(*zip(*course.quality, strict=True), label=name)
    column[1].plot(np.arange(len(smooth)) + window, smooth)
    column[2].plot(steps, course.distance, linewidth=0.8)
    column[3].step(steps, course.every, linewidth=0.8)
