"""Asynchronous Adam on a problem that is not convex, which the paper leaves to future work.

A small net on scikit-learn's digits, dense gradients, two processes that share it, each method at
its best step size of the paper's grid.
"""

from dataclasses import dataclass
from statistics import fmean

import torch

from bench.async_adam.digits_net import Case, Curve, data, work
from bench.async_adam.spread import Spread
from bench.harness import Bench, Claim, Result, command, console
from offbeat.hogwild import launch

GRID = (0.001, 0.005, 0.01, 0.05, 0.1)  # the paper's; larger ones diverge here
METHODS = (("serial Adam", "shared", 1), ("shared, 2", "shared", 2), ("private, 2", "private", 2))
HEADINGS = ("method", "step size", "training loss", "test error", "ms an epoch")
BENCH = Bench(
    name="async_adam/digits",
    claim="Two workers train a net as far as one",
    minutes=2,
    full_minutes=6,
)


def best(curves: list[Curve], label: str) -> list[Curve]:
    """All seeds of a method, at the step size with the lowest mean loss at the end."""
    tried = [
        [curve for curve in curves if (curve.case.label, curve.case.alpha) == (label, alpha)]
        for alpha in GRID
    ]
    return min(tried, key=lambda seeds: fmean(curve.loss[-1] for curve in seeds))


@dataclass(frozen=True)
class End:
    """Training loss and test error after the last epoch, over seeds, and the time of an epoch."""

    loss: Spread
    error: Spread
    seconds: Spread

    @classmethod
    def of(cls, curves: list[Curve]) -> "End":
        lasts = [(c.loss[-1], c.error[-1], c.seconds / (len(c.loss) - 1)) for c in curves]
        return cls(*map(Spread, zip(*lasts, strict=True)))


def claims(serial: End, shared: End, private: End) -> list[Claim]:
    """Differences must be beyond the noise of the seeds."""
    both, epochs = (shared, private), serial.seconds.mean
    gain = [epochs / end.seconds.mean for end in both]
    return [
        Claim("Shared and Private end no higher than serial Adam", f"{serial.loss:.4f}",
              "; ".join(f"{end.loss:.4f}" for end in both),
              not any(end.loss.is_above(serial.loss) for end in both)),
        Claim("their test error is no higher than serial Adam's", f"{serial.error:.4f}",
              "; ".join(f"{end.error:.4f}" for end in both),
              not any(end.error.is_above(serial.error) for end in both)),
        Claim("dense gradients: Shared ends above Private", "expected",
              f"{shared.loss:.4f}; {private.loss:.4f}", shared.loss.is_above(private.loss)),
        Claim("an epoch is faster with 2 workers", "2 x", ", ".join(f"{g:.2f} x" for g in gain),
              min(gain) >= 1 + 1 / 3),
    ]  # fmt: skip


@command(
    BENCH, "--full",
    full="30 seeds instead of 10.", epochs="Passes over the 1,438 training digits.",
)  # fmt: skip
def app(full: bool = False, epochs: int = 8) -> Result:
    """Tune serial Adam, Shared and Private on a small net, over several seeds."""
    seeds = 30 if full else 10
    console.print(f"{seeds * len(GRID) * len(METHODS)} trainings of {epochs} epochs, two processes")
    curves: list[Curve] = []
    for seed in range(seeds):  # one launch each: every shared tensor is an open file
        built = [Case(*method, alpha, seed).build() for alpha in GRID for method in METHODS]
        arrived = torch.zeros(2, dtype=torch.int64).share_memory_()
        curves += launch(work, 2, (built, data(), epochs, arrived))[0]
    chosen = {label: best(curves, label) for label, *_ in METHODS}
    ends = {label: End.of(own) for label, own in chosen.items()}
    rows = [
        (label, f"{chosen[label][0].case.alpha:g}", f"{end.loss:.4f}", f"{end.error:.4f}",
         f"{1e3 * end.seconds.mean:.0f}")
        for label, end in ends.items()
    ]  # fmt: skip
    title = f"A net of 64-64-10 on the digits, {epochs} epochs, {seeds} seeds"
    return Result(title, HEADINGS, rows, claims(*ends.values()), raw=chosen)
