"""Assumption 1 holds: delta stays below 1 in every layer.

A convolutional net on noisy patterns and an LSTM on characters, 16 virtual workers.
"""

from functools import partial
from statistics import median

import torch
from char_gpt import CHARACTERS
from torch import nn

import offbeat
from bench.harness import Bench, Claim, Result, command, text
from bench.harness.case import Case, Data, Task
from bench.harness.seeds import in_threads
from bench.lags.networks import Reader
from offbeat.methods import deltas

WORKERS, LOOKS = 16, 15
HEADINGS = ("model", "layer", "first", "median", "largest", "above 1")
BENCH = Bench(name="lags/delta", minutes=2, full_minutes=20, evidence="Fig. 2")


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def images() -> Data:
    """8 x 8 patterns made from ten noisy prototypes."""
    random = torch.Generator().manual_seed(1)
    prototypes = torch.randn(10, 1, 8, 8, generator=random)
    labels = torch.randint(10, (40_000,), generator=random)
    return (prototypes[labels] + torch.randn(40_000, 1, 8, 8, generator=random), labels), {}


def windows() -> Data:
    """Of 24 characters."""
    return text.windows(24)[0], {}


SGD = partial(torch.optim.SGD, lr=0.0)
LSTM = partial(Reader, len(CHARACTERS), 96, 32)
TASKS = {  # and learning rates
    Task("conv", net, images, 16, optimizer=SGD): 0.05,
    Task("lstm", LSTM, windows, 8, loss=text.loss, optimizer=SGD): 0.5,
}


@command(BENCH, "--full", full={"steps": 1500})
def app(steps: int = 150) -> Result:
    rows, claims, every = [], [], steps // LOOKS

    def look(replica: offbeat.Replica, step: int) -> dict[str, float] | None:
        return None if step % every else deltas(replica.gradients)

    for task, rate in TASKS.items():
        lags = offbeat.lags(density=0.001)
        case = Case("lags", task, lags, WORKERS, steps, rate, schedule=lambda *_: 1.0)
        found = in_threads(case, before=look)
        layers = {name: [delta[name] for delta in found.seen] for name in found.seen[0]}
        for name, values in {**layers, "loss": found.losses[::every]}.items():
            cells = (f"{v:.4f}" for v in (values[0], median(values), max(values)))
            above = f"{sum(v > 1 for v in values)} of {len(values)}" if name in layers else ""
            rows.append((task.name, name, *cells, above))
        largest = max(map(max, layers.values()))
        statement = f"{task.name}: delta is below 1 in every layer throughout training"
        claims.append(Claim(statement, "below 1", f"at most {largest:.3f}", largest <= 1))
    title = f"delta, {WORKERS} workers, density 0.001, {steps} steps"
    return Result(title, HEADINGS, rows, claims)
