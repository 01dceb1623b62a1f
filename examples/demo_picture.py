"""The demo's picture: the held-out loss of each run, over steps and over seconds."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl

mpl.use("Agg")  # writes files, opens no window

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from offbeat.compare import Comparison, Result
from offbeat.compare.curves import Point

COLOURS = ("#6b7280", "#0f766e", "#c2410c", "#6d28d9", "#1d4ed8", "#a16207")
INK, FAINT = "#1f2933", "#e3e7ec"
LABEL_GAP = 0.075  # the least distance of two labels, as a share of the height
STYLE = {
    "font.size": 11,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#9aa5b1",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "xtick.color": "#616e7c",
    "ytick.color": "#616e7c",
    "ytick.left": False,
}


def draw(comparison: Comparison, path: Path) -> None:
    """Write both panels to `path`."""
    setup = comparison.setup
    wire = f"behind {setup.rate / 1e6:g} Mbit/s" if setup.rate else "on one machine's loopback"
    curves = [result for result in comparison.results if result.course is not None]
    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(9.5, 4.0), sharey=True, layout="constrained")
        figure.suptitle(
            f"Held-out loss of a character GPT, {len(setup.ranks_per_node)} nodes {wire}",
            x=0.01,
            ha="left",
            fontsize=12.5,
            fontweight="bold",
        )
        _panel(axes[0], curves, lambda point: point.step, "steps")
        _panel(axes[1], curves, lambda point: point.seconds, "seconds of training")
        figure.savefig(path, dpi=160, facecolor="white")
        plt.close(figure)


def _panel(
    axes: Axes, results: Sequence[Result], unit: Callable[[Point], float], words: str
) -> None:
    ends = []
    for result, colour in zip(results, COLOURS * len(results), strict=False):
        assert result.course is not None, "only methods with a curve are drawn"
        points = result.course.heldout
        axes.plot(
            [unit(point) for point in points],
            [point.loss for point in points],
            color=colour,
            linewidth=2.2,
        )
        ends.append(End(result.name, colour, unit(points[-1]), points[-1].loss))
    furthest = max(end.x for end in ends)
    axes.set_xlim(0, 1.45 * furthest)  # room for the labels
    axes.set_xticks([tick for tick in axes.get_xticks() if tick <= furthest])
    axes.set_xlabel(words)
    _label(axes, ends)


class End(NamedTuple):
    """Where a curve ends."""

    name: str
    colour: str
    x: float
    loss: float


def _label(axes: Axes, ends: Sequence[End]) -> None:
    low, high = axes.get_ylim()
    below = -1.0
    for end in sorted(ends, key=lambda end: end.loss):
        height = max((end.loss - low) / (high - low), below + LABEL_GAP)
        below = height
        axes.annotate(
            f"{end.name}  {end.loss:.2f}",
            (end.x, low + height * (high - low)),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=end.colour,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
            fontweight="bold",
        )
