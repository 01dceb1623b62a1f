"""Figure 4 of the Adasum paper: LeNet-5 at growing batches on the schedule of one batch of 32.

Workers are virtual: one process computes each worker's gradient on its own 32 images and combines
them with the same functions that ranks use. Momentum-SGD, two epochs, linear warm-up and decay.
All-reduce takes the learning rate times the number of workers unless it is tuned, as in the paper.
The paper searched for the most aggressive rate that batches of 32 bear; ours is given by --lr.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from offbeat.functional import Span, coefficients, combine, gram, orthogonality

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import digits

RESULTS = Path(__file__).parent / "results" / "adasum_lenet.json"
BATCH, EPOCHS, WARM_UP, MOMENTUM = 32, 2, 0.17, 0.9
PAPER = "Fig. 4: untuned all-reduce fails above batch 256, untuned Adasum holds at 1024"
console = Console(highlight=False)


@dataclass(frozen=True)
class Run:
    """One training, and what it reached on held-out images."""

    method: str
    workers: int
    lr: float
    accuracy: float
    orthogonality: list[float]  # mean over layers, about 20 points over the run
    seconds: float


def lenet() -> nn.Sequential:
    """Horovod's LeNet-5 for MNIST, without its dropout."""
    return nn.Sequential(
        nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(10, 20, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(), nn.Linear(320, 50), nn.ReLU(), nn.Linear(50, 10),
    )  # fmt: skip


def schedule(step: int, steps: int) -> float:
    """Linear up over the first 17 %, linear down to zero."""
    warm = WARM_UP * steps
    return min((step + 1) / warm, (steps - step) / (steps - warm))


def adasum(updates: Tensor, spans: Sequence[Span]) -> tuple[Tensor, float]:
    """The combination of rows of updates, layer by layer, and its mean orthogonality."""
    size = len(updates)
    products = torch.zeros(len(spans), size, size, dtype=torch.float64)
    gram(updates, spans, products)
    weights, _ = coefficients(products)
    out = torch.empty_like(updates[0])
    combine(updates, spans, weights, out)
    return out, float(orthogonality(products, weights).nanmean())


def train(
    method: str, workers: int, lr: float, images: digits.Images
) -> tuple[nn.Module, list[float]]:
    """Two epochs; all workers together see every image once in each."""
    torch.manual_seed(0)
    model = lenet()
    parameters = list(model.parameters())
    ends = torch.tensor([0, *(p.numel() for p in parameters)]).cumsum(0).tolist()
    spans = [Span(i, a, b) for i, (a, b) in enumerate(pairwise(ends))]
    flat = nn.utils.parameters_to_vector(parameters).detach()
    rows = workers if method == "Adasum" else 1  # the mean gradient needs one velocity only
    gradients, velocity = torch.zeros(workers, ends[-1]), torch.zeros(rows, ends[-1])
    steps = EPOCHS * len(images[0]) // (workers * BATCH)
    measured = []
    order = torch.cat([torch.randperm(len(images[0])) for _ in range(EPOCHS)])
    for step in range(steps):
        chosen = order[step * workers * BATCH :][: workers * BATCH].view(workers, BATCH)
        for row, batch in zip(gradients, chosen, strict=True):
            loss = cross_entropy(model(images[0][batch]), images[1][batch])
            torch.cat([g.view(-1) for g in torch.autograd.grad(loss, parameters)], out=row)
        velocity.mul_(MOMENTUM).add_(gradients if rows > 1 else gradients.mean(0))
        update = velocity[0]
        if rows > 1:
            update, orthogonal = adasum(velocity, spans)
            if step % max(1, steps // 20) == 0:
                measured.append(orthogonal)
        flat -= lr * schedule(step, steps) * update
        nn.utils.vector_to_parameters(flat, parameters)
    return model, measured


@torch.no_grad()
def accuracy(model: nn.Module, held_out: digits.Images) -> float:
    """The share of images that are recognized."""
    logits = torch.cat([model(part) for part in held_out[0].split(1000)])
    return float((logits.argmax(1) == held_out[1]).float().mean())


def run(method: str, workers: int, lr: float, data: tuple[digits.Images, digits.Images]) -> Run:
    """Train and evaluate."""
    started = time.perf_counter()
    model, measured = train(method, workers, lr, data[0])
    found = accuracy(model, data[1])
    return Run(method, workers, lr, found, measured, time.perf_counter() - started)


def table(runs: list[Run]) -> Table:
    """One line a batch size: the untuned accuracies, and the best of all that were tried."""
    shown = Table(title="LeNet-5, schedule of batch 32", caption=PAPER)
    columns = [(m, kind) for m in ("all-reduce", "Adasum") for kind in ("untuned", "tuned")]
    for heading in ("batch", *(f"{method} {kind}" for method, kind in columns)):
        shown.add_column(heading, justify="right")
    for workers in sorted({r.workers for r in runs}):
        cells = []
        for method, kind in columns:
            tried = [r for r in runs if (r.method, r.workers) == (method, workers)]
            if kind == "tuned" and len(tried) > 1:
                best = max(tried, key=lambda r: r.accuracy)
                cells.append(f"{best.accuracy:.2%} ({best.lr:.4g})")
            else:
                cells.append(f"{tried[0].accuracy:.2%}" if tried and kind == "untuned" else "-")
        shown.add_row(str(workers * BATCH), *cells)
    return shown


def main(
    data_dir: Annotated[Path | None, typer.Option(help="Folder with MNIST's IDX files.")] = None,
    lr: Annotated[float, typer.Option(help="Largest learning rate; none was searched for.")] = 0.01,
    train_size: Annotated[int, typer.Option(help="Generated images to train on.")] = 60000,
    full: Annotated[bool, typer.Option("--full", help="Tune the learning rates too.")] = False,
) -> None:
    """Train LeNet-5 with 1, 4, 8, 16 and 32 workers."""
    torch.set_num_threads(1)
    if data_dir is not None:
        data = digits.mnist(data_dir)
    else:
        data = digits.generated(train_size, seed=0), digits.generated(train_size // 6, seed=1)
    runs = []
    for workers in (1, 4, 8, 16, 32):
        for method in ("all-reduce", "Adasum") if workers > 1 else ("all-reduce",):
            untuned = lr * (workers if method == "all-reduce" else 1)
            tried = [untuned, *([lr * f for f in (0.5, 1, 2, 4, 8, 16)] if full else ())]
            for rate in dict.fromkeys(tried):
                runs.append(run(method, workers, rate, data))
                r = runs[-1]
                console.print(
                    f"{r.method}, batch {workers * BATCH}, lr {rate:.4g}: {r.accuracy:.2%}, "
                    f"{r.seconds:.0f} s"
                )
    console.print(table(runs))
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    about = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "torch": torch.__version__}
    source = "MNIST" if data_dir else f"{train_size} generated digits"
    report = about | {"data": source, "runs": [asdict(r) for r in runs]}
    RESULTS.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    console.print(f"all runs: {os.path.relpath(RESULTS)}")


if __name__ == "__main__":
    typer.run(main)
