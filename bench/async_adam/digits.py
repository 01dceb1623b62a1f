"""Asynchronous Adam on a problem that is not convex, which the paper leaves to future work.

A small net on scikit-learn's digits, dense gradients, two processes that share it, each method at
its best step size of the paper's grid.
"""

from dataclasses import asdict
from typing import Annotated

import matplotlib.pyplot as plt
import torch
import typer

from bench.async_adam.digits_net import Case, Curve, data, work
from bench.harness import files
from bench.harness.bench import Bench
from bench.harness.claim import Claim
from bench.harness.console import console
from bench.harness.report import report
from offbeat.hogwild import launch

GRID = (0.001, 0.005, 0.01, 0.05, 0.1)  # the paper's; larger ones diverge here
METHODS = (("serial Adam", "shared", 1), ("shared, 2", "shared", 2), ("private, 2", "private", 2))
HEADINGS = ("method", "step size", "training loss", "test error", "ms an epoch")
BENCH = Bench(
    name="async_adam/digits",
    claim="Two workers train a net as far as one",
    minutes=1,
    full_minutes=5,
)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def best(curves: list[Curve], label: str) -> list[Curve]:
    """All seeds of a method, at the step size with the lowest mean loss at the end."""
    own = [curve for curve in curves if curve.case.label == label]

    def mean(alpha: float) -> float:
        ends = [curve.loss[-1] for curve in own if curve.case.alpha == alpha]
        return sum(ends) / len(ends)

    alpha = min(GRID, key=mean)
    return [curve for curve in own if curve.case.alpha == alpha]


def average(values: list[float]) -> float:
    return sum(values) / len(values)


def claims(ends: dict[str, tuple[float, float]]) -> list[Claim]:
    (serial, shared, private) = (ends[label] for label, *_ in METHODS)
    return [
        Claim("Shared and Private train as far as serial Adam, + 5 % or 0.001", f"{serial[0]:.4f}",
              f"{shared[0]:.4f}, {private[0]:.4f}",
              max(shared[0], private[0]) <= max(1.05 * serial[0], serial[0] + 0.001)),
        Claim("their test error is no higher than serial Adam's", f"{serial[1]:.4f}",
              f"{shared[1]:.4f}, {private[1]:.4f}", max(shared[1], private[1]) <= serial[1]),
        Claim("dense gradients: Private ends no higher than Shared", f"{shared[0]:.4f}",
              f"{private[0]:.4f}", private[0] <= shared[0]),
    ]  # fmt: skip


def draw(chosen: dict[str, list[Curve]]) -> None:
    """Loss and error of the first seed over seconds."""
    canvas, (loss, error) = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
    for label, (curve, *_) in chosen.items():
        loss.semilogy(curve.seconds, curve.loss, label=f"{label}, {curve.case.alpha:g}")
        error.plot(curve.seconds, curve.error)
    loss.set(xlabel="seconds", ylabel="training loss")
    error.set(xlabel="seconds", ylabel="test error")
    loss.legend()
    canvas.savefig(files.raw(BENCH.name, ".png"), dpi=80)


@app.command(epilog=BENCH.examples("--full"))
def main(
    full: Annotated[bool, typer.Option("--full", help="Ten seeds instead of two.")] = False,
    epochs: Annotated[int, typer.Option(help="Passes over the 1,438 training digits.")] = 8,
) -> None:
    """Tune serial Adam, Shared and Private on a small net, over several seeds."""
    seeds = 10 if full else 2
    console.print(f"{seeds * len(GRID) * len(METHODS)} trainings of {epochs} epochs, two processes")
    curves: list[Curve] = []
    for seed in range(seeds):  # one launch each: every shared tensor is an open file
        built = [Case(*method, alpha, seed).build() for alpha in GRID for method in METHODS]
        arrived = torch.zeros(2, dtype=torch.int64).share_memory_()
        curves += launch(work, 2, (built, data(), epochs, arrived))[0]
    chosen = {label: best(curves, label) for label, *_ in METHODS}
    ends = {
        label: (average([c.loss[-1] for c in own]), average([c.error[-1] for c in own]))
        for label, own in chosen.items()
    }
    rows = [
        (label, f"{own[0].case.alpha:g}", f"{ends[label][0]:.4f}", f"{ends[label][1]:.4f}",
         f"{1e3 * min(c.seconds[-1] for c in own) / epochs:.0f}")
        for label, own in chosen.items()
    ]  # fmt: skip
    title = f"A net of 64-64-10 on the digits, {epochs} epochs, {seeds} seeds"
    report(BENCH, title, HEADINGS, rows, claims(ends),
           raw=[asdict(curve) for own in chosen.values() for curve in own])  # fmt: skip
    draw(chosen)


if __name__ == "__main__":
    app()
