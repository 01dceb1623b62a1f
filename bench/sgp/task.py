"""The task of most SGP benchmarks, and virtual workers that train it.

Accuracy comes from virtual workers, threads of one process; time comes from `timing.py`.
"""

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy

import offbeat
from bench.harness.console import console
from offbeat.testing import ThreadWorld

Data = tuple[tuple[Tensor, Tensor], ...]
BATCH = 16  # images per worker and step


@dataclass(frozen=True)
class Case:
    """One training run.

    In one step of fifty a worker stalls for ``stall`` seconds. In every step it sleeps for
    ``compute`` seconds, which stands for the computation of an accelerator of its own; if it is
    ``uneven``, they are the mean of an exponential distribution.
    """

    name: str
    algorithm: offbeat.Algorithm
    world: int
    samples: int = 40_000  # of all workers together
    seed: int = 0
    stall: float = 0.0
    compute: float = 0.0
    uneven: bool = False

    @property
    def steps(self) -> int:
        return max(2, self.samples // (BATCH * self.world))

    def lr(self, step: int) -> float:
        """The paper's: 0.1 per 256 images, warmed up in 5 of 90 epochs, decayed at 30, 60, 80."""
        epoch, full = 90 * step / self.steps, 0.1 * self.world * BATCH / 256
        return full * min(1.0, (epoch + 1) / 5) * 0.1 ** sum(epoch >= e for e in (30, 60, 80))


@dataclass(frozen=True)
class Outcome:
    """Time and accuracy of a run. Accuracies are those of the workers' own models, not averaged."""

    seconds: float  # per step, of the slowest worker
    train: float
    heldout: float
    losses: tuple[float, ...]

    @classmethod
    def of(cls, workers: Sequence["Outcome"]) -> "Outcome":
        """The mean over workers, but the largest time."""
        train, heldout = np.mean([(w.train, w.heldout) for w in workers], axis=0).tolist()
        losses = np.mean([w.losses for w in workers], axis=0).tolist()
        return cls(max(w.seconds for w in workers), train, heldout, tuple(losses))


@cache
def data() -> Data:
    """scikit-learn's digits as rows of 14 x 14 pixels, to train on and held out."""
    from digits import small  # imported late: it takes seconds, and ranks do not need it

    return tuple((avg_pool2d(images, 2).flatten(1), labels) for images, labels in small())


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(196, 512), nn.ReLU(), nn.Linear(512, 10))


def train(
    case: Case,
    start: nn.Module,
    parts: Data,
    mesh: offbeat.World | None = None,
    look: Callable[[int, int, nn.Module], None] = lambda rank, step, model: None,
) -> Outcome:
    """One worker. ``look(rank, step, model)`` comes after the optimizer, before the gossip."""
    model, (images, labels) = copy.deepcopy(start), parts[0]
    replica = offbeat.replicate(model, case.algorithm, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9, nesterov=True)
    rank = replica.world.rank
    random = torch.Generator().manual_seed(1000 * case.seed + rank)
    ends, losses = [], []
    for step in range(case.steps):
        optimizer.param_groups[0]["lr"] = case.lr(step)
        chosen = torch.randint(len(images), (BATCH,), generator=random)
        loss = cross_entropy(model(images[chosen]), labels[chosen])
        if torch.rand(1, generator=random) < 1 / 50:
            time.sleep(case.stall)
        pause = torch.full((), case.compute)
        if case.uneven:
            pause *= torch.empty(()).exponential_(generator=random)
        time.sleep(pause.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        look(rank, step, model)
        replica.step()
        ends.append(time.perf_counter())
        losses.append(loss.item())
    warm_up = min(10, math.ceil(case.steps / 5))
    seconds = (ends[-1] - ends[warm_up - 1]) / (case.steps - warm_up)
    accuracies = [accuracy(model, *part) for part in parts]
    replica.finish()  # all ranks together: a closed connection would end the others' run
    replica.detach()
    return Outcome(seconds, *accuracies, tuple(losses))


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    return (model(images).argmax(1) == labels).float().mean().item()


def in_threads(
    case: Case, look: Callable[[int, int, nn.Module], None] = lambda rank, step, model: None
) -> Outcome:
    """Train virtual workers in this process; the time they take is meaningless."""
    torch.set_num_threads(1)
    start, parts = net(case.seed), data()  # not in threads, which share torch's generator
    world = ThreadWorld(case.world)
    workers = world.run(lambda mesh: train(case, start, parts, mesh, look), timeout=400)
    outcome = Outcome.of(workers)
    console.print(f"{label(case)}: {outcome.heldout:.1%} of the held-out digits", style="dim")
    return outcome


def label(case: Case) -> str:
    return f"{case.name}, {case.world} workers, seed {case.seed}"
