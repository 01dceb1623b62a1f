"""Figure 2 of the Adasum paper: how orthogonal the workers' updates are, layer by layer.

A residual convolutional net and a transformer, four workers as threads of this process, SGD with
momentum. The learning rate falls to a tenth twice; the paper sees drops of orthogonality there.
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
from torch.nn.functional import cross_entropy, relu

import offbeat
from offbeat.groups import Groups
from offbeat.testing import ThreadWorld

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import digits
from char_gpt import GPT, loss_of, read_corpus

RESULTS = Path(__file__).parent / "results" / "adasum_orthogonality.json"
WORKERS, BATCH, CONTEXT, POINTS = 4, 16, 64, 24
PAPER = "Fig. 2: rises towards 1 over training, at another pace in every layer; drops at LR changes"
EPILOG = "Examples: `python bench/adasum_orthogonality.py`, `... --full`"
app = typer.Typer(pretty_exceptions_enable=False)
console = Console(highlight=False)
Loss = Callable[[nn.Module, torch.Generator], Tensor]  # (model, random) -> loss of a fresh batch
Curve = list[dict[str, float]]


class Residual(nn.Module):
    """Two convolutions with BatchNorm, and the input beside them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        kinds = [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)]
        again = [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)]
        self.layers = nn.Sequential(*kinds, nn.ReLU(), *again)

    def forward(self, x: Tensor) -> Tensor:
        return relu(x + self.layers(x))


def resnet() -> nn.Module:
    """Three residual blocks on 28 x 28 images."""
    blocks = [nn.Sequential(Residual(16), nn.MaxPool2d(2)) for _ in range(2)]
    head = [Residual(16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)]
    return nn.Sequential(nn.Conv2d(1, 16, 3, stride=2), *blocks, *head)


def of_images() -> Loss:
    """Cross-entropy on generated digits."""
    images, labels = digits.generated(20000, seed=0)

    def loss(model: nn.Module, random: torch.Generator) -> Tensor:
        chosen = torch.randint(len(images), (BATCH,), generator=random)
        return cross_entropy(model(images[chosen]), labels[chosen])

    return loss


def of_text() -> Loss:
    """Cross-entropy on the standard library's sources."""
    text, _ = read_corpus()

    def loss(model: nn.Module, random: torch.Generator) -> Tensor:
        starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=random)
        return loss_of(model, text, starts, CONTEXT)

    return loss


PROBLEMS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Loss], float]] = {
    "resnet": (resnet, of_images, 0.05),
    "gpt": (lambda: GPT(64, 2, 4, CONTEXT), of_text, 0.1),
}


def measure(name: str, steps: int) -> Curve:
    """Train, and read the orthogonality; each point is the mean over its steps."""
    make, data, lr = PROBLEMS[name]
    loss = data()

    def worker(groups: Groups) -> Curve:
        model = make()
        replica = offbeat.replicate(model, offbeat.adasum(), mesh=groups)
        random = torch.Generator().manual_seed(groups.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        falls = [steps // 2, 3 * steps // 4]
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, falls, gamma=0.1)
        seen = []
        for _ in range(steps):
            loss(model, random).backward()
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
            seen.append(replica.stats()["measures"])
            schedule.step()
        replica.detach()
        return averaged(seen)

    torch.manual_seed(0)
    return ThreadWorld(WORKERS).run(worker, timeout=600.0)[0]


def averaged(seen: Curve) -> Curve:
    """``POINTS`` means over as many equal runs of steps."""
    width = len(seen) // POINTS
    runs = [seen[i * width : (i + 1) * width] for i in range(POINTS)]
    return [{key: sum(m.get(key, 0.0) for m in run) / width for key in run[0]} for run in runs]


def table(curves: dict[str, Curve]) -> Table:
    """Mean, lowest and highest layer at the quarters of training."""
    shown = Table(title="Orthogonality of four workers' updates, mean (layers)", caption=PAPER)
    shown.add_column("model")
    moments = {"begin": 0, "before the 1st fall": POINTS // 2 - 1, "after it": POINTS // 2,
               "after the 2nd": 3 * POINTS // 4, "end": POINTS - 1}  # fmt: skip
    for heading in moments:
        shown.add_column(heading, justify="right")
    for name, curve in curves.items():
        cells = []
        for moment in moments.values():
            layers = [v for key, v in curve[moment].items() if key.startswith("orthogonality/")]
            mean = curve[moment]["orthogonality"]
            cells.append(f"{mean:.2f} ({min(layers):.2f}-{max(layers):.2f})")
        shown.add_row(name, *cells)
    return shown


@app.command(epilog=EPILOG)
def main(
    full: Annotated[bool, typer.Option("--full", help="Five times the steps.")] = False,
) -> None:
    """Measure both models."""
    torch.set_num_threads(1)
    steps = 2400 if full else 480
    curves = {name: measure(name, steps) for name in PROBLEMS}
    console.print(table(curves))
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    about = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "torch": torch.__version__}
    report = about | {"steps": steps, "workers": WORKERS, "curves": curves}
    RESULTS.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    console.print(f"all layers: {os.path.relpath(RESULTS)}")


if __name__ == "__main__":
    app()
