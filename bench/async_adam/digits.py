"""Asynchronous Adam on a problem that is not convex, which the paper leaves to future work.

A small net on scikit-learn's digits, dense gradients, two processes that share it, each method at
its best step size of the paper's grid.
"""

import time
from dataclasses import dataclass, field
from statistics import fmean

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bench.harness import Bench, Claim, Effect, Result, command, console
from offbeat.hogwild import AsyncAdam, launch

BATCH, HELD_OUT = 16, 359
GRID = (0.001, 0.005, 0.01, 0.05, 0.1)  # the paper's; larger ones diverge here
METHODS = (("serial Adam", "shared", 1), ("shared, 2", "shared", 2), ("private, 2", "private", 2))
HEADINGS = ("method", "step size", "training loss", "test error", "ms an epoch")
BENCH = Bench(
    name="async_adam/digits",
    claim="Two workers train a net as far as one",
    minutes=2,
    full_minutes=6,
)
Split = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """A method at a step size, from one start."""

    label: str
    moments: str
    workers: int
    alpha: float
    seed: int

    def build(self) -> tuple["Case", nn.Module, AsyncAdam]:
        """Model and optimizer, in shared memory."""
        torch.manual_seed(self.seed)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        optimizer = AsyncAdam(
            model.parameters(), lr=self.alpha, moments=self.moments, workers=self.workers
        )
        return self, model, optimizer


@dataclass
class Curve:
    """Training loss and test error before each epoch and at the end; seconds of training alone."""

    case: Case
    seconds: float = 0.0
    loss: list[float] = field(default_factory=list)
    error: list[float] = field(default_factory=list)


def data() -> Split:
    """Rows to learn from and rows to test with, the same for all."""
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    test, train = order[:HELD_OUT], order[HELD_OUT:]
    return x[train], y[train], x[test], y[test]


def barrier(number: int, arrived: Tensor) -> None:
    """Wait until both workers have arrived as often as this one."""
    arrived[number] += 1
    while arrived.min() < arrived[number]:
        time.sleep(1e-4)


def work(
    number: int,
    built: list[tuple[Case, nn.Module, AsyncAdam]],
    parts: Split,
    epochs: int,
    arrived: Tensor,
) -> list[Curve]:
    """Train case after case, epoch by epoch together; worker 0 evaluates in between, untimed."""
    x, y, test_x, test_y = parts
    curves = []
    for case, model, optimizer in built:
        random = torch.Generator().manual_seed(10 * case.seed + number)
        curve = Curve(case)
        for epoch in range(epochs + 1):
            if number == 0:
                with torch.no_grad():
                    curve.loss.append(cross_entropy(model(x), y).item())
                    curve.error.append((model(test_x).argmax(1) != test_y).float().mean().item())
            barrier(number, arrived)
            if epoch == epochs:
                break
            start = time.perf_counter()
            if number < case.workers:
                batches = torch.randperm(len(y), generator=random).split(BATCH)
                for rows in batches[number :: case.workers]:
                    optimizer.zero_grad()
                    cross_entropy(model(x[rows]), y[rows]).backward()
                    optimizer.step()
            barrier(number, arrived)
            curve.seconds += time.perf_counter() - start
        curves.append(curve)
    return curves


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

    loss: Effect
    error: Effect
    seconds: Effect

    @classmethod
    def of(cls, curves: list[Curve]) -> "End":
        lasts = [(c.loss[-1], c.error[-1], c.seconds / (len(c.loss) - 1)) for c in curves]
        return cls(*map(Effect.mean, zip(*lasts, strict=True)))


def claims(serial: End, shared: End, private: End) -> list[Claim]:
    """Differences must be beyond the noise of the seeds."""
    both, epochs = (shared, private), serial.seconds.size
    gain = [epochs / end.seconds.size for end in both]
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
         f"{1e3 * end.seconds.size:.0f}")
        for label, end in ends.items()
    ]  # fmt: skip
    title = f"A net of 64-64-10 on the digits, {epochs} epochs, {seeds} seeds"
    return Result(title, HEADINGS, rows, claims(*ends.values()), raw=chosen)
