"""Agreement and loss of gossip, and the step of Adasum, from 4 to 1,024 workers.

Virtual workers: the equations without a network. A small network learns another one from noisy
samples; every worker has its own.
"""

from dataclasses import dataclass
from statistics import fmean

import torch
from rich.progress import track
from torch import Tensor, nn
from torch.optim import SGD

import offbeat
from bench.harness import Bench, Claim, Result, command, console, files, numbers
from bench.scale.picture import draw
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
BENCH = Bench(
    name="scale/agreement",
    claim="Gossip agrees and learns at any size, as its graphs predict",
    minutes=1,
    full_minutes=4,
)


@dataclass(frozen=True)
class Run:
    """The end of a run: of the last quarter of its steps, the mean."""

    distance: float  # RMS of the workers to their mean
    predicted: float  # from the spectrum of the graphs, and the spread of gradients
    loss: float  # of the mean model, on fresh samples, without the noise of labels
    gap: float


class Task:
    """Samples of a teacher with noise, for all workers at once."""

    def __init__(self, size: int) -> None:
        self._generator = torch.Generator().manual_seed(size)
        torch.manual_seed(0)
        self.teacher, self.size = network(), size

    def batch(self) -> tuple[Tensor, Tensor]:
        """Inputs (n, batch, 16) and labels (n, batch)."""
        x = torch.randn(self.size, BATCH, 16, generator=self._generator)
        with torch.no_grad():
            y = self.teacher(x)[..., 0]
        return x, y + NOISE * torch.randn(y.shape, generator=self._generator)

    @torch.no_grad()
    def loss(self, workers: VirtualWorkers) -> float:
        """The error of the mean model on 4,096 samples, relative to that of zero."""
        x = torch.randn(4096, 16, generator=torch.Generator().manual_seed(0))
        mean = {name: value.mean(0) for name, value in workers.parameters().items()}
        y = self.teacher(x)
        found = torch.func.functional_call(workers.model, mean, (x,))
        return float((found - y).square().mean() / y.square().mean())


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 1))


def error(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x)[..., 0] - y).square().mean()


def gossip(name: str, size: int, steps: int) -> Run:
    """Train under one graph; distances and losses are means over the last quarter."""
    task, topology = Task(size), GRAPHS[name]
    workers = virtual(offbeat.sgp(topology), size)
    distances, losses, spreads, pulls = [], [], [], []
    for step in range(steps):
        before = workers.rows.detach().clone()
        workers.step(error, *task.batch())
        if step >= steps - steps // 4:
            grads = workers.rows.grad
            assert grads is not None, "the optimizer has used them"
            distances.append(rms(workers.rows.detach()))
            spreads.append(RATE * rms(grads) * (size / (size - 1)) ** 0.5)
            pulls.append(RATE * pull(before, grads))
            losses.append(task.loss(workers))
    predicted = fmean(spreads) * amplification(topology, size, steps, 1 - fmean(pulls))
    return Run(fmean(distances), predicted, fmean(losses), gap(topology, size))


def adasum_step(size: int, steps: int) -> tuple[float, float]:
    """The step of Adasum along the mean gradient, in units of the mean step: first, and last."""
    task = Task(size)
    workers = virtual(offbeat.adasum(), size)
    ratios = []
    for _ in range(steps):
        before = workers.rows.detach()[0].clone()
        workers.step(error, *task.batch())
        assert workers.rows.grad is not None, "the optimizer has used them"
        average = -RATE * workers.rows.grad.mean(0)
        moved = workers.rows.detach()[0] - before
        ratios.append(float(moved @ average / (average @ average)))
    return fmean(ratios[:5]), fmean(ratios[-steps // 4 :])


def virtual(algorithm: offbeat.Algorithm, size: int) -> VirtualWorkers:
    torch.manual_seed(1)
    return VirtualWorkers(
        algorithm, network(), size=size, optimizer=lambda parameters: SGD(parameters, lr=RATE)
    )


def rms(rows: Tensor) -> float:
    """The root of the mean squared distance to the mean."""
    return float((rows - rows.mean(0)).square().sum(1).mean().sqrt())


def pull(rows: Tensor, grads: Tensor) -> float:
    """The curvature of the loss along the distances to the mean: how gradients pull them back."""
    apart = rows - rows.mean(0)
    squares = float(apart.square().sum())
    return float((apart * (grads - grads.mean(0))).sum()) / squares if squares > 1e-9 else 0.0


def claims(found: dict[str, dict[int, Run]], steps: dict[int, tuple[float, float]]) -> list[Claim]:
    small, large = sorted(steps)[1], max(steps)  # four workers are averaged by two exchanges
    off = [abs(run.distance / run.predicted - 1) for by_size in found.values()
           for run in by_size.values() if run.predicted > 1e-6]  # fmt: skip
    one, ring, exact = (found[n] for n in ("exponential, 1 peer", "ring", "complete"))
    growth = one[large].distance / one[small].distance
    worse = one[large].loss / exact[large].loss
    first = {size: begin for size, (begin, _) in steps.items()}
    return [
        Claim("distances are those that the spectra of the graphs predict", "within 10 %",
              f"at most {100 * max(off):.0f} % off", max(off) < 0.1),
        Claim(f"the exponential graph keeps its distance from {small} to {large} workers",
              "at most 1.5 times", f"{growth:.2f} times, ring "
              f"{ring[large].distance / ring[small].distance:.2f} times", growth < 1.5),
        Claim(f"{large} workers learn as well by one peer as by exact averages", "loss within 5 %",
              f"{worse:.3f} times the loss", worse < 1.05),
        Claim("Adasum: parallel gradients are averaged, orthogonal ones added",
              "a growing step, below n", f"{steps[large][0]:.1f} at first, "
              f"{steps[large][1]:.1f} at the end, of {large}",
              1 <= first[large] < steps[large][1] < large),
    ]  # fmt: skip


@command(BENCH, "--full", full="Four times as many steps.", worlds="Numbers of workers.")
def app(full: bool = False, worlds: str = "4,16,64,256,1024", steps: int = 200) -> Result:
    """Follow virtual workers under five graphs and Adasum."""
    sizes, count = sorted(numbers(worlds)), steps * (4 if full else 1)
    runs = [(name, size) for name in GRAPHS for size in sizes]
    found: dict[str, dict[int, Run]] = {name: {} for name in GRAPHS}
    for name, size in track(runs, "gossip", console=console):
        found[name][size] = gossip(name, size, count)
    tree = {size: adasum_step(size, count) for size in track(sizes, "Adasum", console=console)}
    draw(found, tree, files.ASSETS / "agreement.png")
    rows = [
        (name, f"{size}", f"{run.gap:.2g}", f"{run.distance:.3g}", f"{run.predicted:.3g}",
         f"{run.loss:.4f}")
        for name, by_size in found.items() for size, run in by_size.items()
    ]  # fmt: skip
    rows += [
        ("Adasum", f"{size}", "", "", "", f"step {a:.1f}, {b:.1f}") for size, (a, b) in tree.items()
    ]
    headings = ("graph", "workers", "gap", "distance", "predicted", "loss of the mean")
    title = f"Distance of workers and loss after {count} steps"
    return Result(title, headings, rows, claims(found, tree), found)
