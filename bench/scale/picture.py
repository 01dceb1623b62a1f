"""A picture of agreement against the number of workers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def draw(
    runs: Mapping[str, Mapping[int, Any]], adasum: Mapping[int, tuple[float, float]], file: Path
) -> None:
    """Distance and loss of the runs of every graph, as predicted too, and the step of Adasum."""
    figure = Figure(figsize=(12, 4), layout="constrained")
    distance, loss, step = figure.subplots(1, 3)
    for name, by_size in runs.items():
        sizes = list(by_size)
        shown = [size for size in sizes if by_size[size].predicted > 1e-6]
        lines = distance.plot(shown, [by_size[size].distance for size in shown], "o", label=name)
        color = lines[0].get_color()
        distance.plot(shown, [by_size[size].predicted for size in shown], color=color)
        loss.plot(sizes, [by_size[size].loss for size in sizes], "o-", color=color)
    for place, label in enumerate(("first steps", "end")):
        step.plot(list(adasum), [both[place] for both in adasum.values()], "o-", label=label)
    step.plot(list(adasum), list(adasum), color="0.7", label="sum")
    for axes, title in (
        (distance, "distance to the mean; lines: predicted"),
        (loss, "error of the mean model"),
        (step, "step of Adasum, in mean steps"),
    ):
        axes.set(xscale="log", yscale="log", xlabel="workers", title=title)
    distance.legend(fontsize="small")
    step.legend(fontsize="small")
    figure.savefig(file, dpi=110)
