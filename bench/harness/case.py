"""What a bench trains to learn an accuracy: a task, and the case of one run."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import offbeat

Part = tuple[Tensor, Tensor]
Data = tuple[Part, Mapping[str, Part]]  # to train on, and to score by name, "heldout" among them
Model = Callable[[Tensor], Tensor]
SGD = partial(torch.optim.SGD, lr=0.0, momentum=0.9, nesterov=True)


def imagenet(step: int, steps: int) -> float:
    """A factor of the rate: warmed up in 5 of 90 epochs, a tenth at 30, 60 and 80."""
    epoch = 90 * step / steps
    return min(1.0, (epoch + 1) / 5) * 0.1 ** sum(epoch >= e for e in (30, 60, 80))


@torch.no_grad()
def accuracy(model: Model, x: Tensor, labels: Tensor) -> float:
    """In %."""
    return 100 * (model(x).argmax(1) == labels).double().mean().item()


@dataclass(frozen=True)
class Task:
    """What is learnt. For the lab, its functions are those of a module."""

    name: str
    net: Callable[[], nn.Module]
    data: Callable[[], Data]
    batch: int  # samples per worker and step
    score: Callable[..., float] = accuracy
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = SGD

    def steps(self, samples: float, workers: int) -> int:
        """So many that all workers together see ``samples``."""
        return max(2, int(samples / (self.batch * workers)))


@dataclass(frozen=True)
class Pause:
    """What a step takes beside computing: a pause, as on an accelerator of the worker's own.

    It may vary from step to step as an exponential distribution; in one of fifty a worker stalls.
    """

    seconds: float = 0.0
    uneven: bool = False
    stall: float = 0.0

    def sleep(self, random: torch.Generator) -> None:
        stalls = torch.rand(1, generator=random).item() < 1 / 50
        times = torch.empty(()).exponential_(generator=random).item() if self.uneven else 1.0
        time.sleep(self.seconds * times + self.stall * stalls)


@dataclass(frozen=True)
class Case:
    name: str
    task: Task
    algorithm: offbeat.Algorithm
    workers: int
    steps: int
    rate: float  # the peak
    schedule: Callable[[int, int], float] = imagenet  # of step and steps: a factor of the rate
    seed: int = 0
    per_node: int = 1
    pause: Pause | None = None
    consensus: bool = False  # score the average model, not each worker's

    @property
    def nodes(self) -> list[list[int]]:
        return torch.arange(self.workers).reshape(-1, self.per_node).tolist()

    def start(self) -> nn.Module:
        """The net at the start, equal for all workers."""
        torch.manual_seed(self.seed)
        return self.task.net()

    def lr(self, step: int) -> float:
        return self.rate * self.schedule(step, self.steps)

    def __str__(self) -> str:
        return f"{self.task.name}, {self.name}, {self.workers} workers, seed {self.seed}"


@dataclass(frozen=True)
class Outcome:
    """Scores and losses are means over workers, of their own models unless the case says else."""

    scores: Mapping[str, float]
    losses: Sequence[float] = ()
    seconds: float = math.nan  # per step, of the slowest worker
    seen: Sequence[Any] = ()  # what the hooks of the first worker have returned

    @classmethod
    def of(cls, workers: Sequence["Outcome"]) -> "Outcome":
        scores = {name: fmean(w.scores[name] for w in workers) for name in workers[0].scores}
        losses = [*map(fmean, zip(*(w.losses for w in workers), strict=True))]
        return cls(scores, losses, max(w.seconds for w in workers), workers[0].seen)

    @property
    def heldout(self) -> float:
        return self.scores["heldout"]
