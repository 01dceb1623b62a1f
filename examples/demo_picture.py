"""The pictures of the demos: loss curves with labels at their ends."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")  # writes files, opens no window

import matplotlib.pyplot as plt
from demo_table import seconds_to
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from offbeat.compare import Comparison
from offbeat.compare.curves import Point

# Distinguishable with the common colour vision deficiencies (Okabe and Ito), on white.
COLOURS = ("#5b6470", "#0072b2", "#d55e00", "#008562", "#a2387f", "#8a6d00")
STYLE = {
    "font.size": 11,
    "text.color": "#1f2933",
    "axes.labelcolor": "#1f2933",
    "axes.edgecolor": "#9aa5b1",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.titlesize": 11.5,
    "axes.titlelocation": "left",
    "grid.color": "#e3e7ec",
    "xtick.color": "#616e7c",
    "ytick.color": "#616e7c",
    "ytick.left": False,
}
SKIP = 0.07  # share of a run whose losses may lie above the picture
GAP = 0.063  # between two labels, as a share of the panel's height


@dataclass(frozen=True)
class Line:
    """One curve. ``label`` is written beside its end."""

    label: str
    colour: str
    x: Sequence[float]
    y: Sequence[float]


def draw(comparison: Comparison, path: Path) -> None:
    """Write the held-out loss of all methods over seconds, and the baseline's last loss."""
    setup = comparison.setup
    link = f"{setup.rate / 1e6:g} Mbit/s links" if setup.rate else "unlimited loopback"
    title = f"Character GPT on {len(setup.ranks_per_node)} nodes, {link}, about equal time"
    with figure(title, 1, path) as drawn:
        (axes,), lines = drawn.axes, curves(comparison)
        limit(axes, lines, SKIP)
        panel(axes, lines, beside)
        last = {r.name: r.course.heldout[-1].loss for r in comparison.results if r.course}
        if (level := last.get(comparison.baseline)) is not None:
            axes.axhline(level, color=COLOURS[0], linestyle=(0, (4, 3)), linewidth=1.2)
            for line in lines:
                points = [Point(0, *point) for point in zip(line.x, line.y, strict=True)]
                if (reached := seconds_to(points, level)) is not None:
                    axes.plot(reached, level, "o", color=line.colour, markersize=4.5)
        axes.set(title="held-out loss over seconds of training", xlabel="seconds")


def curves(comparison: Comparison) -> list[Line]:
    """Return the held-out curves; labels are the recipe's name, last loss and steps."""
    results = [(r.name, r.course.heldout) for r in comparison.results if r.course is not None]
    recipes = [name.partition("(")[0] for name, _ in results]
    lines = []
    for number, ((name, points), recipe) in enumerate(zip(results, recipes, strict=True)):
        shown = recipe if recipes.count(recipe) == 1 else name
        label = f"{shown}  {points[-1].loss:.2f} ({points[-1].step} steps)"
        colour = COLOURS[number % len(COLOURS)]
        lines.append(Line(label, colour, [p.seconds for p in points], [p.loss for p in points]))
    return lines


@contextmanager
def figure(title: str, panels: int, path: Path) -> Iterator[Figure]:
    """Open a figure whose panels share the vertical axis, and write it to ``path`` at the end."""
    with mpl.rc_context(STYLE):
        drawn, _ = plt.subplots(
            1, panels, figsize=(9.5, 4.4), sharey=True, layout="constrained", squeeze=False
        )
        drawn.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        yield drawn
        drawn.savefig(path, dpi=150, facecolor="white")
        plt.close(drawn)


def limit(axes: Axes, lines: Sequence[Line], skip: float) -> None:
    """Fit the vertical axis to the lines, with room for labels below them.

    It ends at the highest loss after the share ``skip`` of the runs, since losses fall steeply at
    the start.
    """
    low = min(min(line.y) for line in lines)
    high = max(y for line in lines for x, y in zip(line.x, line.y, strict=True)
               if x >= skip * line.x[-1])  # fmt: skip
    labels = GAP * (len(lines) + 1)  # the share of the height that stays free for them
    axes.set_ylim(low - labels / (1 - labels) * (high - low), high)
    least = low - 0.02 * (high - low)
    axes.set_yticks([tick for tick in axes.get_yticks() if least <= tick <= high])


def panel(axes: Axes, lines: Sequence[Line], place: Callable[[Axes, Sequence[Line]], None]) -> None:
    """Draw the lines and label their ends."""
    for line in lines:
        axes.plot(line.x, line.y, color=line.colour, linewidth=2.1)
        axes.plot(line.x[-1], line.y[-1], "o", color=line.colour, markersize=4.5)
    place(axes, lines)


def beside(axes: Axes, lines: Sequence[Line]) -> None:
    """Put labels to the right of the curves, in the order of their ends."""
    end = _widen(axes, lines, 1.45)
    gap, height = _gap(axes), float("-inf")
    ordered = sorted(lines, key=lambda line: line.y[-1])
    ends = [line.y[-1] for line in ordered]
    start = (ends[0] + ends[-1] - (len(ends) - 1) * gap) / 2
    for number, line in enumerate(ordered):
        # Centred on the ends if these are close together, else level with each end.
        height = max(height + gap, min(ends[number], start + number * gap))
        axes.annotate(
            line.label,
            (end, ends[number]),
            xytext=(1.07 * end, height),
            color=line.colour,
            fontweight="bold",
            va="center",
            arrowprops={"arrowstyle": "-", "color": line.colour, "relpos": (0, 0.5)},
        )


def below(axes: Axes, lines: Sequence[Line]) -> None:
    """Put labels below the ends as stairs: the later a curve ends, the higher its label."""
    end = _widen(axes, lines, 1.25)
    gap = _gap(axes)
    height = min(line.y[-1] for line in lines)
    for line in sorted(lines, key=lambda line: -line.x[-1]):
        height -= gap
        x = line.x[-1]
        axes.plot([x, x], [height, line.y[-1]], color=line.colour, linewidth=0.9)
        at = (x + 0.015 * end, height)
        axes.text(*at, line.label, color=line.colour, fontweight="bold", va="center")


def _widen(axes: Axes, lines: Sequence[Line], factor: float) -> float:
    """Leave room for labels to the right of the last end; returns that end."""
    end = max(line.x[-1] for line in lines)
    axes.set_xlim(0, factor * end)
    axes.set_xticks([tick for tick in axes.get_xticks() if tick <= 1.001 * end])
    return end


def _gap(axes: Axes) -> float:
    low, high = axes.get_ylim()
    return GAP * (high - low)
