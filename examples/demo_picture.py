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
        ends = _panel(axes[0], curves, lambda point: point.step, "steps")
        axes[0].set_xlim(0, 1.45 * max(end.x for end in ends))  # room for the names
        axes[0].set_xticks([tick for tick in axes[0].get_xticks() if tick <= ends[0].x])
        _name(axes[0], ends)
        for end in _panel(axes[1], curves, lambda point: point.seconds, "seconds of training"):
            _label(axes[1], end, f"{end.x:.0f} s", end.loss, (-4, -16))
        low, high = axes[0].get_ylim()
        axes[0].set_ylim(low - 0.06 * (high - low), high)  # room for the seconds
        figure.savefig(path, dpi=160, facecolor="white")
        plt.close(figure)


def _panel(
    axes: Axes, results: Sequence[Result], unit: Callable[[Point], float], words: str
) -> list["End"]:
    ends = []
    for result, colour in zip(results, COLOURS * len(results), strict=False):
        assert result.course is not None, "only methods with a curve are drawn"
        points = result.course.heldout
        across, losses = [unit(point) for point in points], [point.loss for point in points]
        axes.plot(across, losses, color=colour, linewidth=2.2)
        ends.append(End(result.name, colour, across[-1], losses[-1]))
    axes.set_xlim(left=0)
    axes.set_xlabel(words)
    return ends


class End(NamedTuple):
    """Where a curve ends."""

    name: str
    colour: str
    x: float
    loss: float


def _name(axes: Axes, ends: Sequence[End]) -> None:
    """Each curve's name and last loss beside its end, moved up until they are apart."""
    low, high = axes.get_ylim()
    below = -1.0
    for end in sorted(ends, key=lambda end: end.loss):
        below = max((end.loss - low) / (high - low), below + LABEL_GAP)
        _label(axes, end, f"{end.name}  {end.loss:.2f}", low + below * (high - low), (6, -4))


def _label(axes: Axes, end: End, words: str, height: float, offset: tuple[int, int]) -> None:
    axes.annotate(
        words,
        (end.x, height),
        xytext=offset,
        textcoords="offset points",
        color=end.colour,
        fontweight="bold",
    )
