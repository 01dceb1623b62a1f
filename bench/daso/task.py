"""Two tasks for the accuracy of DASO, and virtual workers that train them."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import digits
import digits_cnn
import numpy as np
import segmentation
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import offbeat
from bench.harness.console import console
from offbeat.testing import ThreadWorld

PER_NODE = 2
Part = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """What an example learns; ``evaluate`` gives the loss and a quality in 0..1."""

    name: str
    quality: str
    net: Callable[[], nn.Module]
    parts: Callable[[], tuple[Part, Part]]  # to train on, and held out
    evaluate: Callable[[nn.Module, Tensor, Tensor], tuple[float, float]]
    batch: int  # images per worker and step
    lr: float  # of four workers


@cache
def shapes() -> tuple[Part, Part]:
    return segmentation.pictures(2000, seed=1), segmentation.pictures(200, seed=0)


DIGITS = Task(
    "digits", "accuracy", digits_cnn.net, cache(digits.small), digits_cnn.evaluate, 16, 0.05
)
SHAPES = Task("shapes", "mean IoU", segmentation.UNet, shapes, segmentation.evaluate, 8, 0.1)


@dataclass(frozen=True)
class Case:
    """One training run of ``workers``, two per node; ``follow`` records its course."""

    name: str
    task: Task
    algorithm: Callable[[int], offbeat.Algorithm]  # of the number of steps
    workers: int
    samples: int  # of all workers together
    seed: int = 0
    follow: bool = False

    @property
    def steps(self) -> int:
        return self.samples // (self.task.batch * self.workers)

    def lr(self, step: int) -> float:
        """The paper's: grows with the workers, warmed up in 5 of 90 epochs, halved six times."""
        part, full = step / self.steps, self.task.lr * self.workers / 4
        return full * min(1.0, (18 * part) + 1 / self.steps) * 0.5 ** int(6 * part)


@dataclass
class Course:
    """Measurements step by step; empty if the run is not followed."""

    distance: list[float] = field(default_factory=list)  # of the replicas, after each step
    quality: list[tuple[int, float]] = field(default_factory=list)  # held out, after so many steps
    every: list[float] = field(default_factory=list)  # B


@dataclass(frozen=True)
class Outcome:
    """The mean held-out quality of the workers' own models, which are not averaged."""

    quality: float
    losses: tuple[float, ...]
    course: Course


def train(case: Case, start: nn.Module, parts: tuple[Part, Part], mesh: offbeat.World) -> Outcome:
    """One worker."""
    model, ((images, target), held_out) = copy.deepcopy(start), parts
    replica = offbeat.replicate(model, case.algorithm(case.steps), mesh=mesh)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.0, momentum=0.9, weight_decay=1e-4, nesterov=True
    )
    random = torch.Generator().manual_seed(1000 * case.seed + mesh.rank)
    losses, course = [], Course()
    for step in range(case.steps):
        optimizer.param_groups[0]["lr"] = case.lr(step)
        chosen = torch.randint(len(images), (case.task.batch,), generator=random)
        loss = cross_entropy(model(images[chosen]), target[chosen])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        replica.report_loss(loss)
        replica.step()
        losses.append(loss.item())
        if case.follow:
            course.distance.append(replica.consensus_distance()["mean"])
            course.every.append(replica.stats()["measures"].get("every", 1))
            if mesh.rank == 0 and step % max(1, case.steps // 15) == 0:
                course.quality.append((step + 1, case.task.evaluate(model, *held_out)[1]))
    quality = case.task.evaluate(model, *held_out)[1]
    replica.finish()  # all ranks together: a closed connection would end the others' run
    replica.detach()
    return Outcome(quality, tuple(losses), course)


def in_threads(case: Case) -> Outcome:
    """Train virtual workers in this process; the time they take is meaningless."""
    torch.set_num_threads(1)
    torch.manual_seed(case.seed)  # not in threads, which share torch's generator
    start, parts = case.task.net(), case.task.parts()
    ranks = np.arange(case.workers).reshape(-1, PER_NODE).tolist()
    workers: Sequence[Outcome] = ThreadWorld(nodes=ranks).run(
        lambda mesh: train(case, start, parts, mesh), timeout=400
    )
    losses = np.mean([worker.losses for worker in workers], axis=0).round(4).tolist()
    quality = float(np.mean([worker.quality for worker in workers]))
    console.print(
        f"{case.task.name}, {case.name}, {case.workers} workers, seed {case.seed}: {quality:.1%}",
        style="dim",
    )
    return Outcome(quality, tuple(losses), workers[0].course)
