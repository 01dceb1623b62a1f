"""Two workers train a net as far as one: not convex, which the paper leaves to future work.

A small net on scikit-learn's digits, dense gradients, two processes that share it, each method at
its best step size of the paper's grid.
"""

import time
from collections import defaultdict
from itertools import product
from statistics import fmean

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bench.harness import Bench, Claim, Effect, Result, command
from offbeat.hogwild import AsyncAdam, launch

BATCH, HELD_OUT = 16, 359
GRID = (0.001, 0.005, 0.01, 0.05, 0.1)  # the paper's; larger ones diverge here
METHODS = {"serial Adam": ("shared", 1), "shared, 2": ("shared", 2), "private, 2": ("private", 2)}
HEADINGS = ("method", "step size", "training loss", "test error", "ms an epoch")
BENCH = Bench(name="async_adam/digits", minutes=2, full_minutes=6)
Shared = tuple[nn.Module, AsyncAdam, int]  # model and optimizer in shared memory, for workers
End = tuple[float, float, float]  # training loss, test error, seconds of an epoch


def build(moments: str, workers: int, alpha: float, seed: int) -> Shared:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = AsyncAdam(model.parameters(), lr=alpha, moments=moments, workers=workers)
    return model, optimizer, workers


def data() -> list[tuple[Tensor, Tensor]]:
    """Rows to learn from and rows to test with, the same for all."""
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    return [(x[rows], y[rows]) for rows in (order[HELD_OUT:], order[:HELD_OUT])]


def barrier(number: int, arrived: Tensor) -> None:
    """Wait until both workers have arrived as often as this one."""
    arrived[number] += 1
    while arrived.min() < arrived[number]:
        time.sleep(1e-4)


def work(number: int, built: list[Shared], seed: int, epochs: int, arrived: Tensor) -> list[End]:
    """Train model after model, epoch by epoch together, and evaluate each."""
    (x, y), (test_x, test_y) = data()
    ends = []
    for model, optimizer, workers in built:
        random = torch.Generator().manual_seed(10 * seed + number)
        barrier(number, arrived)
        start = time.perf_counter()
        for _ in range(epochs):
            if number < workers:
                batches = torch.randperm(len(y), generator=random).split(BATCH)
                for rows in batches[number::workers]:
                    optimizer.zero_grad()
                    cross_entropy(model(x[rows]), y[rows]).backward()
                    optimizer.step()
            barrier(number, arrived)
        seconds = (time.perf_counter() - start) / epochs
        with torch.no_grad():
            error = (model(test_x).argmax(1) != test_y).float().mean()
            ends.append((cross_entropy(model(x), y).item(), error.item(), seconds))
    return ends


@command(
    BENCH, "--full", full={"seeds": 30}, epochs="Passes over the 1,438 training digits."
)  # fmt: skip
def app(seeds: int = 10, epochs: int = 8) -> Result:
    cases = [*product(METHODS, GRID)]
    ends = defaultdict[tuple[str, float], list[End]](list)
    for seed in range(seeds):  # one launch each: every shared tensor is an open file
        built = [build(*METHODS[name], alpha, seed) for name, alpha in cases]
        arrived = torch.zeros(2, dtype=torch.int64).share_memory_()
        first, _ = launch(work, 2, (built, seed, epochs, arrived))
        for case, end in zip(cases, first, strict=True):
            ends[case].append(end)
    rows, found = [], []
    for name in METHODS:  # at the step size with the lowest mean loss
        alpha = min(GRID, key=lambda each, name=name: fmean(end[0] for end in ends[name, each]))
        losses, errors, seconds = zip(*ends[name, alpha], strict=True)
        loss, error, epoch = Effect.mean(losses), Effect.mean(errors), fmean(seconds)
        rows.append((name, f"{alpha:g}", f"{loss:.4f}", f"{error:.4f}", f"{1e3 * epoch:.0f}"))
        found.append((loss, error, epoch))
    losses, errors, epochs_of = zip(*found, strict=True)
    gains = [epochs_of[0] / each for each in epochs_of[1:]]

    def no_higher(text: str, ends: tuple[Effect, ...]) -> Claim:
        """Differences must be beyond the noise of the seeds."""
        serial, *both = ends
        shown = "; ".join(f"{end:.4f}" for end in both)
        return Claim(text, f"{serial:.4f}", shown, not any(end.is_above(serial) for end in both))

    claims = [
        no_higher("Shared and Private end no higher than serial Adam", losses),
        no_higher("their test error is no higher than serial Adam's", errors),
        Claim("dense gradients: Shared ends above Private", "expected",
              f"{losses[1]:.4f}; {losses[2]:.4f}", losses[1].is_above(losses[2])),
        Claim("an epoch is faster with 2 workers", "2 x", ", ".join(f"{g:.2f} x" for g in gains),
              min(gains) >= 1 + 1 / 3),
    ]  # fmt: skip
    title = f"A net of 64-64-10 on the digits, {epochs} epochs, {seeds} seeds"
    return Result(title, HEADINGS, rows, claims)
