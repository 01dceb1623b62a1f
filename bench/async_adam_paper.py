"""The figures of Renda, Asynchronous Adam, drawn anew, and what it leaves for later work.

Every method is tuned on the paper's grid. Its figures have no numbers in the text, so that its
claims in words stand beside ours.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated

import matplotlib.pyplot as plt
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))

from _sparse import Curve, Problem, adam, baseline, generate

RESULTS = Path(__file__).parent / "results" / "async_adam_paper.json"
GRID = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0)  # section 4.2
THREAD_GRID = (0.01, 0.03, 0.05, 0.075, 0.1, 0.3, 0.5, 0.75, 1.0)  # section 4.3.2
CLAIMS = {
    "1": "no significant gain over serial Adam; Shared a little before Private",
    "2": "over iterations the parallel ones are worse at the same step size",
    "3": "small step: nearly linear gain with threads",
    "4": "best step each: 2 threads beat 1, more do not",
    "5": "large step: more threads are worse",
    "sparser": "(future work) fewer conflicts",
    "dense": "(future work) Shared expected worse than Private",
}
console = Console(highlight=False)
Run = Callable[[Problem, int, float], Curve]


def tuned(run: Run, problem: Problem, passes: int, grid: tuple[float, ...]) -> Curve:
    """The curve of the step size with the lowest loss at the end."""
    curves = [(run(problem, passes, alpha), alpha) for alpha in grid]
    curve, alpha = min(curves, key=lambda pair: pair[0].loss[-1])
    return Curve(f"{curve.label}, {alpha:g}", curve.seconds, curve.loss, curve.error)


def against_each_other(problem: Problem, passes: int) -> list[Curve]:
    """Figure 1: each method at its best step size."""
    runs: list[Run] = [partial(adam, moments=m, threads=2) for m in ("shared", "private")]
    runs += [adam, partial(baseline, svrg=False), partial(baseline, svrg=True)]
    return [tuned(run, problem, passes, GRID) for run in track(runs, problem.name, console=console)]


def figures(passes: int) -> dict[str, list[Curve]]:
    """All curves by figure."""
    paper = generate("figure 1")
    threads = (1, 2, 4, 8)
    runs: list[Run] = [partial(adam, threads=count) for count in threads]
    drawn = {"1": against_each_other(paper, passes)}
    drawn["2"] = [
        adam(paper, passes, 0.01, m, t) for m, t in (("shared", 1), ("shared", 2), ("private", 2))
    ]
    drawn["3"] = [run(paper, passes, 0.001) for run in runs]
    drawn["4"] = [tuned(run, paper, passes, THREAD_GRID) for run in runs]
    drawn["5"] = [run(paper, passes, 0.5) for run in runs]
    drawn["sparser"] = against_each_other(generate("density 0.001", 0.001), passes)
    drawn["dense"] = against_each_other(generate("dense", 1.0, n=2000, d=256), passes)
    return drawn


def seconds_to(curve: Curve, loss: float) -> float:
    """Seconds until the loss was reached; infinite if it never was."""
    reached = [s for s, found in zip(curve.seconds, curve.loss, strict=True) if found <= loss]
    return min(reached, default=float("inf"))


def table(name: str, curves: list[Curve]) -> Table:
    """One line a curve: how low it came, and when it was where the worst ended."""
    shown = Table(title=f"figure {name}; the paper: {CLAIMS[name]}")
    common = max(curve.loss[-1] for curve in curves)
    for heading in ("method", "final loss", "test error", "ms a pass", f"s to {common:.4f}"):
        shown.add_column(heading, justify="left" if heading == "method" else "right")
    for c in curves:
        pace = 1e3 * c.seconds[-1] / (len(c.seconds) - 1)
        numbers = (f"{c.loss[-1]:.4f}", f"{c.error[-1]:.4f}", f"{pace:.2f}")
        shown.add_row(c.label, *numbers, f"{seconds_to(c, common):.3f}")
    return shown


def draw(drawn: dict[str, list[Curve]], file: Path) -> None:
    """Loss and test error of every figure over seconds (figure 2: over passes)."""
    canvas, axes = plt.subplots(2, len(drawn), figsize=(4 * len(drawn), 6), layout="constrained")
    for column, (name, curves) in zip(axes.T, drawn.items(), strict=True):
        for curve in curves:
            across = range(len(curve.loss)) if name == "2" else curve.seconds
            column[0].semilogy(across, curve.loss, label=curve.label)
            column[1].plot(across, curve.error)
        column[0].set(title=f"figure {name}" if name.isdigit() else name, ylabel="training loss")
        column[1].set(xlabel="passes" if name == "2" else "seconds", ylabel="test error")
        column[0].legend(fontsize="x-small")
    canvas.savefig(file)


def main(
    full: Annotated[bool, typer.Option("--full", help="Five times the passes.")] = False,
) -> None:
    """Draw all figures."""
    drawn = figures(100 if full else 20)
    for name, curves in drawn.items():
        console.print(table(name, curves))
    cores = os.cpu_count() or 1
    console.print(f"{cores} cores: figures 3 to 5 have more threads than that" if cores < 8 else "")
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    figures_ = {name: [asdict(curve) for curve in curves] for name, curves in drawn.items()}
    RESULTS.write_text(json.dumps({"date": date, "cores": cores, "figures": figures_}) + "\n")
    draw(drawn, RESULTS.with_suffix(".png"))
    console.print(f"written: {RESULTS} and the picture beside it")


if __name__ == "__main__":
    typer.run(main)
