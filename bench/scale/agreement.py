"""Gossip agrees and learns at any size, as its graphs predict: from 4 to 1,024 workers.

Virtual workers: the equations without a network. A small network learns another one from noisy
samples; every worker has its own. The step of Adasum is followed too.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from statistics import fmean

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.optim import SGD

import offbeat
from bench.harness import Bench, Claim, Result, command, files, numbers
from bench.scale.spread import amplification, gap
from offbeat.testing.virtual import VirtualWorkers
from offbeat.topology import Topology

GRAPHS: dict[str, Topology] = {
    "ring": offbeat.Ring(),
    "bipartite": offbeat.BipartiteExponential(),
    "exponential, 1 peer": offbeat.Exponential(),
    "exponential, 2 peers": offbeat.Exponential(peers=2),
    "complete": offbeat.Complete(),
}
BATCH, RATE, NOISE = 8, 0.05, 0.5
HEADINGS = ("graph", "workers", "gap", "distance", "predicted", "loss of the mean")
BENCH = Bench(name="scale/agreement", minutes=1, full_minutes=4)


@dataclass(frozen=True)
class Run:
    """The end of a run: of the last quarter of its steps, the mean."""

    distance: float  # RMS of the workers to their mean
    predicted: float  # from the spectrum of the graphs, and the spread of gradients
    loss: float  # of the mean model, on fresh samples, without the noise of labels
    gap: float


Found = dict[str, dict[int, Run]]  # by graph and workers
Steps = dict[int, tuple[float, float]]  # of Adasum by workers, in mean steps: first, and last


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 1))


@cache
def teacher() -> nn.Module:
    torch.manual_seed(0)
    return network().requires_grad_(False)


def error(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x)[..., 0] - y).square().mean()


def trained(
    algorithm: offbeat.Algorithm, size: int, steps: int
) -> Iterator[tuple[VirtualWorkers, Tensor, Tensor]]:
    """The workers after each step, their rows before it, and its gradients."""
    learnt, random = teacher(), torch.Generator().manual_seed(size)
    torch.manual_seed(1)
    workers = VirtualWorkers(algorithm, network(), size=size, optimizer=partial(SGD, lr=RATE))
    for _ in range(steps):
        x = torch.randn(size, BATCH, 16, generator=random)
        y = learnt(x)[..., 0] + NOISE * torch.randn(size, BATCH, generator=random)
        before = workers.rows.detach().clone()
        workers.step(error, x, y)
        assert workers.rows.grad is not None, "the optimizer has used them"
        yield workers, before, workers.rows.grad


def gossip(name: str, size: int, steps: int) -> Run:
    """Train under one graph; distances and losses are means over the last quarter."""
    topology, distances, losses, spreads, pulls = GRAPHS[name], [], [], [], []
    for step, (workers, before, grads) in enumerate(trained(offbeat.sgp(topology), size, steps)):
        if step >= steps - steps // 4:
            distances.append(rms(workers.rows.detach()))
            spreads.append(RATE * rms(grads) * (size / (size - 1)) ** 0.5)
            pulls.append(RATE * pull(before, grads))
            losses.append(loss_of_mean(workers))
    predicted = fmean(spreads) * amplification(topology, size, steps, 1 - fmean(pulls))
    return Run(fmean(distances), predicted, fmean(losses), gap(topology, size))


def adasum_step(size: int, steps: int) -> tuple[float, float]:
    """The step of Adasum along the mean gradient, in units of the mean step: first, and last."""
    ratios = []
    for workers, before, grads in trained(offbeat.adasum(), size, steps):
        average, moved = -RATE * grads.mean(0), workers.rows.detach()[0] - before[0]
        ratios.append(float(moved @ average / (average @ average)))
    return fmean(ratios[:5]), fmean(ratios[-steps // 4 :])


@torch.no_grad()
def loss_of_mean(workers: VirtualWorkers) -> float:
    """The error of the mean model on 4,096 samples, relative to that of zero."""
    x = torch.randn(4096, 16, generator=torch.Generator().manual_seed(0))
    mean = {name: value.mean(0) for name, value in workers.parameters().items()}
    found, y = torch.func.functional_call(workers.model, mean, (x,)), teacher()(x)
    return float((found - y).square().mean() / y.square().mean())


def rms(rows: Tensor) -> float:
    return float((rows - rows.mean(0)).square().sum(1).mean().sqrt())


def pull(rows: Tensor, grads: Tensor) -> float:
    """The curvature of the loss along the distances to the mean: how gradients pull them back."""
    apart = rows - rows.mean(0)
    squares = float(apart.square().sum())
    return float((apart * (grads - grads.mean(0))).sum()) / squares if squares > 1e-9 else 0.0


def claims(found: Found, steps: Steps) -> list[Claim]:
    small, large = sorted(steps)[1], max(steps)  # four workers are averaged by two exchanges
    runs = [run for by_size in found.values() for run in by_size.values() if run.predicted > 1e-6]
    off = max(abs(run.distance / run.predicted - 1) for run in runs)
    one, ring, exact = (found[n] for n in ("exponential, 1 peer", "ring", "complete"))
    growth, of_ring = (each[large].distance / each[small].distance for each in (one, ring))
    worse = one[large].loss / exact[large].loss
    first, last = steps[large]
    return [
        Claim("distances are those that the spectra of the graphs predict", "within 10 %",
              f"at most {100 * off:.0f} % off", off < 0.1),
        Claim(f"the exponential graph keeps its distance from {small} to {large} workers",
              "at most 1.5 times", f"{growth:.2f} times, ring {of_ring:.2f} times", growth < 1.5),
        Claim(f"{large} workers learn as well by one peer as by exact averages", "loss within 5 %",
              f"{worse:.3f} times the loss", worse < 1.05),
        Claim("Adasum: parallel gradients are averaged, orthogonal ones added",
              "a growing step, below n", f"{first:.1f} at first, {last:.1f} at the end, of {large}",
              1 <= first < last < large),
    ]  # fmt: skip


def draw(found: Found, adasum: Steps) -> None:
    figure = Figure(figsize=(12, 4), layout="constrained")
    distance, loss, step = figure.subplots(1, 3)
    for name, by_size in found.items():
        shown = [size for size, run in by_size.items() if run.predicted > 1e-6]
        lines = distance.plot(shown, [by_size[size].distance for size in shown], "o", label=name)
        color = lines[0].get_color()
        distance.plot(shown, [by_size[size].predicted for size in shown], color=color)
        loss.plot([*by_size], [run.loss for run in by_size.values()], "o-", color=color)
    for place, label in enumerate(("first steps", "end")):
        step.plot([*adasum], [both[place] for both in adasum.values()], "o-", label=label)
    step.plot([*adasum], [*adasum], color="0.7", label="sum")
    for axes, title in (
        (distance, "distance to the mean; lines: predicted"),
        (loss, "error of the mean model"),
        (step, "step of Adasum, in mean steps"),
    ):
        axes.set(xscale="log", yscale="log", xlabel="workers", title=title)
    distance.legend(fontsize="small")
    step.legend(fontsize="small")
    figure.savefig(files.ASSETS / "agreement.png", dpi=110)


@command(BENCH, "--full", full={"steps": 800}, worlds="Numbers of workers.")
def app(worlds: str = "4,16,64,256,1024", steps: int = 200) -> Result:
    sizes = sorted(numbers(worlds))
    found = {name: {size: gossip(name, size, steps) for size in sizes} for name in GRAPHS}
    tree = {size: adasum_step(size, steps) for size in sizes}
    draw(found, tree)
    rows = [
        (name, f"{size}", f"{run.gap:.2g}", f"{run.distance:.3g}", f"{run.predicted:.3g}",
         f"{run.loss:.4f}")
        for name, by_size in found.items() for size, run in by_size.items()
    ]  # fmt: skip
    rows += [
        ("Adasum", f"{size}", "", "", "", f"step {a:.1f}, {b:.1f}") for size, (a, b) in tree.items()
    ]
    title = f"Distance of workers and loss after {steps} steps"
    return Result(title, HEADINGS, rows, claims(found, tree), found)
