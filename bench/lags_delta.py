"""Figure 2 of the LAGS paper: delta of every layer over training, with 16 workers as threads.

Assumption 1 holds where delta is at most 1. The paper reports delta < 1 throughout, for three
nets; here a convolutional net on noisy patterns and an LSTM on this Python's own sources.
"""

import json
import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import offbeat
from offbeat.gradients import deltas
from offbeat.groups import Groups
from offbeat.testing import ThreadWorld

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from char_gpt import CHARACTERS, read_corpus

RESULTS = Path(__file__).parent / "results" / "lags_delta.json"
WORKERS = 16
console = Console(highlight=False)
Batch = Callable[[torch.Generator], tuple[Tensor, Tensor]]


class Reader(nn.Module):
    """A character language model of two LSTM layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(CHARACTERS), 32)
        self.lstm = nn.LSTM(32, 96, num_layers=2, batch_first=True)
        self.head = nn.Linear(96, len(CHARACTERS))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0]).flatten(0, 1)


def images() -> tuple[Callable[[], nn.Module], Batch, float]:
    """A small convolutional net, batches of 8 x 8 patterns made from ten noisy prototypes."""
    prototypes = torch.randn(10, 1, 8, 8, generator=torch.Generator().manual_seed(1))

    def net() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10),
        )  # fmt: skip

    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        labels = torch.randint(10, (16,), generator=generator)
        return prototypes[labels] + torch.randn(16, 1, 8, 8, generator=generator), labels

    return net, batch, 0.05


def text() -> tuple[Callable[[], nn.Module], Batch, float]:
    """The LSTM, windows of 24 characters."""
    train, _ = read_corpus()

    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(train) - 25, (8,), generator=generator)
        window = train[starts[:, None] + torch.arange(25)]
        return window[:, :-1], window[:, 1:].flatten()

    return Reader, batch, 0.5


def train(
    groups: Groups, model: nn.Module, batch: Batch, lr: float, steps: int, every: int
) -> dict[str, list[float]]:
    """One worker: delta of every layer, every few steps, and its loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    replica = offbeat.replicate(
        model, offbeat.lags(density=0.001), mesh=groups, optimizer=optimizer
    )
    generator = torch.Generator().manual_seed(groups.rank)
    seen: dict[str, list[float]] = {}
    for step in range(steps):
        x, y = batch(generator)
        loss = cross_entropy(model(x), y)
        loss.backward()
        if step % every == 0:
            for name, value in {**deltas(replica.gradients_state), "loss": loss.item()}.items():
                seen.setdefault(name, []).append(value)
        optimizer.step()
        optimizer.zero_grad()
        replica.step()
    replica.detach()
    return seen


def main(
    full: Annotated[bool, typer.Option("--full", help="Ten times the steps.")] = False,
) -> None:
    """Train both models and print the course of delta."""
    torch.set_num_threads(1)
    steps = 1500 if full else 150
    found = {}
    for name, task in {"conv": images, "lstm": text}.items():
        build, batch, lr = task()
        models = [build() for _ in range(WORKERS)]
        found[name] = ThreadWorld(WORKERS).run(
            lambda g, m=models, b=batch, r=lr: train(g, m[g.rank], b, r, steps, steps // 15),
            timeout=3600,
        )[0]
    shown = Table(title=f"delta, {WORKERS} workers, density 0.001; paper: below 1 throughout")
    for heading in ("model", "layer", "first", "median", "largest", "above 1"):
        shown.add_column(heading, justify="left" if heading in ("model", "layer") else "right")
    for name, layers in found.items():
        for layer, values in layers.items():
            middle, above = sorted(values)[len(values) // 2], sum(v > 1 for v in values)
            numbers = [f"{v:.4f}" for v in (values[0], middle, max(values))]
            count = "" if layer == "loss" else f"{above} of {len(values)}"
            shown.add_row(name, layer, *numbers, count)
    console.print(shown)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    about = {"torch": torch.__version__, "workers": WORKERS, "steps": steps}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps({"date": date, **about, "delta": found}, indent=1) + "\n")
    console.print(f"all values: {os.path.relpath(RESULTS)}")


if __name__ == "__main__":
    typer.run(main)
