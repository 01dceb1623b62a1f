"""The demo's picture: the held-out loss of each run, over steps and over seconds."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")  # writes files, opens no window

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

Curve = Sequence[Mapping[str, float]]

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


def draw(curves: Mapping[str, Curve], workers: int, path: Path) -> None:
    """Write both panels to `path`; a curve's points hold step, seconds and heldout_loss."""
    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(9.5, 4.0), sharey=True, layout="constrained")
        figure.suptitle(
            f"Held-out loss of a character GPT on {workers} workers, nats per character",
            x=0.01,
            ha="left",
            fontsize=12.5,
            fontweight="bold",
        )
        for panel, unit in zip(axes, ("step", "seconds"), strict=True):
            _panel(panel, curves, unit)
        figure.savefig(path, dpi=160, facecolor="white")
        plt.close(figure)


def _panel(axes: Axes, curves: Mapping[str, Curve], unit: str) -> None:
    for (_, curve), colour in zip(curves.items(), COLOURS * len(curves), strict=False):
        losses = [point["heldout_loss"] for point in curve]
        axes.plot([point[unit] for point in curve], losses, color=colour, linewidth=2.2)
    furthest = max(curve[-1][unit] for curve in curves.values())
    axes.set_xlim(0, 1.3 * furthest)  # room for the labels
    axes.set_xticks([tick for tick in axes.get_xticks() if tick <= furthest])
    axes.set_xlabel("steps" if unit == "step" else "seconds of training")
    _label(axes, curves, unit)


def _label(axes: Axes, curves: Mapping[str, Curve], unit: str) -> None:
    low, high = axes.get_ylim()
    below = -1.0
    colours = dict(zip(curves, COLOURS * len(curves), strict=False))
    for name, curve in sorted(curves.items(), key=lambda item: item[1][-1]["heldout_loss"]):
        end = curve[-1]
        height = max((end["heldout_loss"] - low) / (high - low), below + LABEL_GAP)
        below = height
        axes.annotate(
            f"{name}  {end['heldout_loss']:.2f}",
            (end[unit], low + height * (high - low)),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=colours[name],
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
            fontweight="bold",
        )
