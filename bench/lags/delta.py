"""Assumption 1 of the LAGS paper: delta of every layer over training (Figure 2).

The assumption holds where delta is at most 1. A convolutional net on noisy patterns and an LSTM on
characters, 16 virtual workers.
"""

from collections import defaultdict
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

WORKERS, LOSS = 16, "loss"
HEADINGS = ("model", "layer", "first", "median", "largest", "above 1")
BENCH = Bench(
    name="lags/delta",
    claim="Delta stays below 1 in every layer (Fig. 2)",
    minutes=2,
    full_minutes=20,
    evidence={"Fig. 2": "Assumption 1 holds: delta stays below 1 in every layer"},
)
Found = dict[str, dict[str, list[float]]]  # by model and layer; the loss beside the layers


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
TASKS = {  # and learning rates
    Task("conv", net, images, 16, optimizer=SGD): 0.05,
    Task("lstm", partial(Reader, len(CHARACTERS), 96, 32), windows, 8, loss=text.loss,
         optimizer=SGD): 0.5,
}  # fmt: skip


def follow(task: Task, rate: float, steps: int) -> dict[str, list[float]]:
    """Delta of every layer, 15 times, and the loss."""
    seen, every = defaultdict[str, list[float]](list), steps // 15

    def look(replica: offbeat.Replica, step: int) -> None:
        if step % every == 0:
            for name, value in deltas(replica.gradients).items():
                if replica.world.rank == 0:
                    seen[name].append(value)

    lags = offbeat.lags(density=0.001)
    case = Case("lags", task, lags, WORKERS, steps, rate, schedule=lambda *_: 1.0)
    losses = in_threads(case, before=look).losses
    return {**seen, LOSS: [*losses[::every]]}


def rows(found: Found) -> list[tuple[str, ...]]:
    """First, median and largest delta of every layer, and how often it was above 1."""
    lines = []
    for name, layers in found.items():
        for layer, values in layers.items():
            numbers = [f"{v:.4f}" for v in (values[0], median(values), max(values))]
            above = "" if layer == LOSS else f"{sum(v > 1 for v in values)} of {len(values)}"
            lines.append((name, layer, *numbers, above))
    return lines


def claims(found: Found) -> list[Claim]:
    made = []
    for name, layers in found.items():
        largest = max(max(values) for layer, values in layers.items() if layer != LOSS)
        text = f"{name}: delta is below 1 in every layer throughout training"
        made.append(Claim(text, "below 1", f"at most {largest:.3f}", largest <= 1))
    return made


@command(BENCH, "--full", full="Ten times the steps.")
def app(full: bool = False) -> Result:
    """Train both models and record delta."""
    steps = 1500 if full else 150
    found = {task.name: follow(task, rate, steps) for task, rate in TASKS.items()}
    title = f"delta, {WORKERS} workers, density 0.001, {steps} steps"
    return Result(title, HEADINGS, rows(found), claims(found), raw=found)
