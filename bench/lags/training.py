"""Training to a score on held-out data, by virtual workers under any method."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from char_gpt import CHARACTERS, read_corpus
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy

import offbeat
from bench.lags.networks import Reader
from offbeat.transport.world import World

MOMENTUM, LENGTH, LOOKS = 0.9, 24, 8
Parts = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
Curve = list[float]  # scores during training, the last at the end


@dataclass(frozen=True)
class Task:
    """What is learnt; ``paper`` has the figures of Table 1 for dense SGD, SLGS and LAGS."""

    name: str
    model: Callable[[], nn.Module]
    parts: Callable[[], Parts]
    batch: int
    lr: float
    paper: tuple[float, float, float]
    score: Callable[[Tensor, Tensor], Tensor]
    more_is_better: bool
    momentum: float = MOMENTUM

    @property
    def near(self) -> float:
        """The largest loss in the paper's Table 1, in % of a score: ResNet-20's, LSTM-PTB's."""
        return 1.2 if self.more_is_better else 2.6


@cache
def digits() -> Parts:
    """scikit-learn's digits, 14 x 14 pixels, to train on and held out."""
    from digits import small

    train, heldout = ((avg_pool2d(images, 2), labels) for images, labels in small())
    return train, heldout


@cache
def text() -> Parts:
    """Windows of characters, and the characters that follow."""

    def windows(part: Tensor, count: int) -> tuple[Tensor, Tensor]:
        starts = torch.linspace(0, len(part) - LENGTH - 2, count).long()
        window = part[starts[:, None] + torch.arange(LENGTH + 1)]
        return window[:, :-1], window[:, 1:]

    train, heldout = read_corpus()
    return windows(train, 8192), windows(heldout, 128)


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.argmax(1) == labels).float().mean()


def perplexity(logits: Tensor, following: Tensor) -> Tensor:
    return cross_entropy(logits, following.flatten()).exp()


# Plain SGD, as in the paper's Algorithm 1; its rate for an LSTM is 22. Of the rates 1, 3, 6, 12 and
# 22 this is the best for dense SGD.
LSTM = Task("LSTM", lambda: Reader(len(CHARACTERS), 96), text, 8, 12.0, (106.7, 109.4, 105.7),
            perplexity, False, momentum=0.0)  # fmt: skip


def train(
    world: World,
    task: Task,
    start: nn.Module,
    algorithm: offbeat.Algorithm,
    steps: int,
    seed: int,
) -> Curve:
    """One worker; its model is that of all when it is looked at."""
    model, ((x, y), heldout) = copy.deepcopy(start), task.parts()
    corrected = getattr(algorithm.gradients, "momentum", 0.0) > 0
    momentum = 0.0 if corrected else task.momentum
    optimizer = torch.optim.SGD(model.parameters(), lr=task.lr, momentum=momentum)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, task.lr, steps, pct_start=0.1, cycle_momentum=False
    )
    replica = offbeat.replicate(model, algorithm, mesh=world, optimizer=optimizer)
    random, found = torch.Generator().manual_seed(1000 * seed + world.rank), []
    for step in range(steps):
        chosen = torch.randint(len(x), (task.batch,), generator=random)
        cross_entropy(model(x[chosen]), y[chosen].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        replica.step()
        if (step + 1) * LOOKS % steps < LOOKS:
            with replica.consensus(), torch.no_grad():
                model.eval()
                found.append(task.score(model(heldout[0]), heldout[1]).item())
                model.train()
    replica.detach()
    return found
