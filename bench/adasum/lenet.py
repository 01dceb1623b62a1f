"""Accuracy of LeNet-5 at growing batches on the schedule of batch 32 (Figure 4 of the paper).

Workers are virtual: one process computes each worker's gradient on its own 32 images and combines
them with the functions that ranks use. Ten epochs of 8,000 real digits, SGD with momentum 0.5,
linear warm-up and decay. The rate is tuned at batch 32. Untuned, Adasum takes this rate and
all-reduce takes it for the sum of all gradients; tuned, each takes the best of several. Rates are
those of one worker, as in the paper: all-reduce's mean gradient takes them times the workers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import digits
import torch
import typer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bench.adasum.network import accuracy, lenet
from bench.adasum.real_digits import real
from bench.harness.bench import Bench
from bench.harness.claim import Claim
from bench.harness.console import console
from bench.harness.effect import Effect
from bench.harness.report import report
from offbeat.functional import Segment, add_gram, coefficients, combine_rows

BATCH, EPOCHS, WARM_UP, MOMENTUM = 32, 10, 0.17, 0.5
RATES = (0.01, 0.03, 0.1)  # tried at batch 32
WORKERS = (4, 8, 16, 32)
# Of that rate, tried beside 1 at the largest batch, and with --full at all.
FACTORS = {"all-reduce": (1 / 32, 1 / 16, 1 / 8, 1 / 4), "Adasum": (2, 4)}
LEARNS = 0.9  # accuracy; ten classes by chance: 0.1
BENCH = Bench(
    name="adasum/lenet",
    claim="Adasum holds at batch 1024 (Fig. 4)",
    minutes=3,
    full_minutes=12,
    evidence={"Fig. 4": "Holds at batch 1024 untuned, where an all-reduce fails"},
)
METHODS = ("all-reduce", "Adasum")
Data = tuple[digits.Images, digits.Images]
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Run:
    """One training run and its held-out accuracy."""

    method: str
    workers: int
    lr: float  # of one worker
    accuracy: float
    seed: int = 0


Chosen = dict[tuple[str, int], Run]  # by method and workers


def schedule(step: int, steps: int) -> float:
    """Linear up over the first 17 %, linear down to zero."""
    warm = WARM_UP * steps
    return min((step + 1) / warm, (steps - step) / (steps - warm))


def adasum(updates: Tensor, spans: Sequence[Segment]) -> Tensor:
    """The combination of rows of updates, layer by layer."""
    size = len(updates)
    products = torch.zeros(len(spans), size, size, dtype=torch.float64)
    add_gram(updates, spans, products)
    weights, _ = coefficients(products)
    out = torch.empty_like(updates[0])
    combine_rows(updates, spans, weights, out)
    return out


def train(method: str, workers: int, lr: float, images: digits.Images, seed: int) -> nn.Module:
    """All workers together use every image once in each epoch."""
    torch.manual_seed(seed)
    model = lenet()
    parameters = list(model.parameters())
    ends = torch.tensor([0, *(p.numel() for p in parameters)]).cumsum(0).tolist()
    spans = [Segment(i, a, b) for i, (a, b) in enumerate(pairwise(ends))]
    flat = nn.utils.parameters_to_vector(parameters).detach()
    rows = workers if method == "Adasum" else 1  # the sum of gradients needs a single velocity
    gradients, velocity = torch.zeros(workers, ends[-1]), torch.zeros(rows, ends[-1])
    steps = EPOCHS * len(images[0]) // (workers * BATCH)
    order = torch.cat([torch.randperm(len(images[0])) for _ in range(EPOCHS)])
    for step in range(steps):
        chosen = order[step * workers * BATCH :][: workers * BATCH].view(workers, BATCH)
        for row, batch in zip(gradients, chosen, strict=True):
            loss = cross_entropy(model(images[0][batch]), images[1][batch])
            torch.cat([g.view(-1) for g in torch.autograd.grad(loss, parameters)], out=row)
        velocity.mul_(MOMENTUM).add_(gradients if rows > 1 else gradients.sum(0))
        update = adasum(velocity, spans) if rows > 1 else velocity[0]
        flat -= lr * schedule(step, steps) * update
        nn.utils.vector_to_parameters(flat, parameters)
    return model


def run(method: str, workers: int, lr: float, data: Data, seed: int = 0) -> Run:
    """Train and evaluate."""
    found = accuracy(train(method, workers, lr, data[0], seed), data[1])
    console.print(
        f"{method}, batch {workers * BATCH}, lr {lr:.4g}, seed {seed}: {found:.2%}", style="dim"
    )
    return Run(method, workers, lr, found, seed)


def best(runs: Sequence[Run]) -> Run:
    return max(runs, key=lambda run: run.accuracy)


def cell(runs: Sequence[Run]) -> str:
    return f"{best(runs).accuracy:.2%} ({best(runs).lr:.4g})" if len(runs) > 1 else "-"


def claims(untuned: Chosen, tuned: Chosen, again: Sequence[tuple[Run, Run]]) -> list[Claim]:
    """``again``: with other seeds, untuned Adasum and tuned all-reduce with the most workers."""
    reduce, adasum = ([untuned[m, w].accuracy for w in WORKERS] for m in METHODS)
    shown = "/".join(f"{a:.1%}" for a in reduce)
    most = WORKERS[-1]
    theirs, ours = (tuned[m, most] for m in METHODS)
    pairs = [(untuned["Adasum", most], theirs), *again]
    above = Effect.mean([100 * (a.accuracy - b.accuracy) for a, b in pairs])
    higher = Effect(ours.lr / theirs.lr, "x")
    return [
        Claim.effect("batch 1024: Adasum's best rate of a worker is higher than all-reduce's",
                     Effect(0.02 / 0.004, "x"), higher),
        Claim("untuned all-reduce fails above batch 256", "fails at 512 and 1024",
              f"{shown} at 128/256/512/1024", max(reduce[2:]) < LEARNS),
        Claim("untuned Adasum holds at batch 1024", "converges", f"{adasum[-1]:.1%}",
              adasum[-1] > LEARNS),
        Claim("batch 1024: untuned Adasum is more accurate than tuned all-reduce", "far more",
              str(above), above.size > 0 and above.is_beyond_noise),
    ]  # fmt: skip


@app.command(epilog=BENCH.examples("--data-dir mnist"))
def main(
    data_dir: Annotated[Path | None, typer.Option(help="Folder with MNIST's IDX files.")] = None,
    seeds: Annotated[int, typer.Option(help="Runs of what is compared at batch 1024.")] = 3,
    full: Annotated[bool, typer.Option("--full", help="Tune at every batch.")] = False,
) -> None:
    """Train LeNet-5 with 1 to 32 workers."""
    torch.set_num_threads(1)
    try:
        data = digits.mnist(data_dir) if data_dir else real()
    except OSError as error:
        console.print(f"{BENCH.name} is left out: its digits cannot be fetched ({error})")
        return
    alone = [run("all-reduce", 1, rate, data) for rate in RATES]
    lr = best(alone).lr
    rows = [(f"{BATCH}", cell(alone), "", "", "")]
    untuned: Chosen = {}
    tuned: Chosen = {}
    runs = alone
    for workers in WORKERS:
        tried = {}
        for method in METHODS:
            factors = FACTORS[method] if full or workers == WORKERS[-1] else ()
            tried[method] = [run(method, workers, lr * f, data) for f in (1, *factors)]
            untuned[method, workers], tuned[method, workers] = tried[method][0], best(tried[method])
            runs = [*runs, *tried[method]]
        cells = [(f"{untuned[m, workers].accuracy:.2%}", cell(tried[m])) for m in METHODS]
        rows.append((f"{workers * BATCH}", *cells[0], *cells[1]))
    compared = [untuned["Adasum", WORKERS[-1]], tuned["all-reduce", WORKERS[-1]]]
    again = [
        tuple(run(each.method, each.workers, each.lr, data, seed) for each in compared)
        for seed in range(1, seeds)
    ]
    headings = ("batch", "all-reduce", "tuned (rate)", "Adasum", "tuned (rate)")
    source = "MNIST" if data_dir else f"{len(data[0][0])} real digits"
    title = f"LeNet-5 on {source}, rate {lr:g} tuned at batch {BATCH}"
    judged = claims(untuned, tuned, again)
    report(BENCH, title, headings, rows, judged, measured=[*runs, *again])


if __name__ == "__main__":
    app()
