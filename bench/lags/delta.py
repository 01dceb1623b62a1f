"""Assumption 1 of the LAGS paper: delta of every layer over training (Figure 2).

The assumption holds where delta is at most 1. A convolutional net on noisy patterns and an LSTM on
characters, 16 virtual workers.
"""

import copy
from statistics import median

import torch
from char_gpt import CHARACTERS, read_corpus
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import offbeat
from bench.harness import Bench, Claim, Result, command, console
from bench.harness.attached import Task
from bench.lags.networks import Reader
from offbeat.methods import deltas
from offbeat.testing import ThreadWorld
from offbeat.transport.world import World

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


def images() -> Task:
    """A small convolutional net, batches of 8 x 8 patterns made from ten noisy prototypes."""
    prototypes = torch.randn(10, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    net = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip

    def loss(module: nn.Module, random: torch.Generator) -> Tensor:
        labels = torch.randint(10, (16,), generator=random)
        noise = torch.randn(16, 1, 8, 8, generator=random)
        return cross_entropy(module(prototypes[labels] + noise), labels)

    return Task(net, loss)


def text() -> Task:
    """A language model of two LSTM layers, windows of 24 characters."""
    train, _ = read_corpus()

    def loss(module: nn.Module, random: torch.Generator) -> Tensor:
        starts = torch.randint(len(train) - 25, (8,), generator=random)
        window = train[starts[:, None] + torch.arange(25)]
        return cross_entropy(module(window[:, :-1]), window[:, 1:].flatten())

    return Task(Reader(len(CHARACTERS), 96, 32), loss)


TASKS = {"conv": (images, 0.05), "lstm": (text, 0.5)}  # and learning rates


def train(world: World, task: Task, lr: float, steps: int) -> dict[str, list[float]]:
    """One worker: delta of every layer, 15 times, and its loss."""
    model = copy.deepcopy(task.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    replica = offbeat.replicate(model, offbeat.lags(density=0.001), mesh=world, optimizer=optimizer)
    random = torch.Generator().manual_seed(world.rank)
    seen: dict[str, list[float]] = {}
    for step in range(steps):
        loss = task.loss(model, random)
        loss.backward()
        if step % (steps // 15) == 0:
            for name, value in {**deltas(replica.gradients), LOSS: loss.item()}.items():
                seen.setdefault(name, []).append(value)
        optimizer.step()
        optimizer.zero_grad()
        replica.step()
    replica.detach()
    return seen


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
    torch.set_num_threads(1)
    steps = 1500 if full else 150
    found: Found = {}
    for name, (build, lr) in TASKS.items():
        task = build()
        found[name] = ThreadWorld(WORKERS).run(
            lambda world, task=task, lr=lr: train(world, task, lr, steps), timeout=3600
        )[0]
        console.print(f"{name}: trained", style="dim")
    title = f"delta, {WORKERS} workers, density 0.001, {steps} steps"
    return Result(title, HEADINGS, rows(found), claims(found), raw=found)
