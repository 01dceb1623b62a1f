"""A small net on scikit-learn's digits that one or two processes train together."""

import time
from dataclasses import dataclass, field

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from offbeat.hogwild import AsyncAdam

BATCH, HELD_OUT = 16, 359
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
