"""Training to a score on held-out data, by virtual workers under any method."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, partial

from char_gpt import CHARACTERS
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d
from torch.optim import SGD

import offbeat
from bench.harness import console, text
from bench.harness.case import Case, Data, Model, Task
from bench.harness.case import accuracy as percent
from bench.harness.seeds import in_threads
from bench.lags.networks import Reader

MOMENTUM = 0.9
WARM, START, END = 0.1, 1 / 25, 1 / 25e4  # of the steps, and rates as shares of the peak
LENGTH = 24  # characters of a window
TEXT = cache(partial(text.windows, LENGTH, 8192, 128))


@dataclass(frozen=True)
class Learnt:
    """A task; ``paper`` has the figures of Table 1 for dense SGD, SLGS and LAGS."""

    task: Task
    lr: float
    paper: tuple[float, float, float]
    more_is_better: bool = True
    momentum: float = MOMENTUM

    @property
    def near(self) -> float:
        """The largest loss in the paper's Table 1, in % of a score: ResNet-20's, LSTM-PTB's."""
        return 1.2 if self.more_is_better else 2.6


@cache
def digits() -> Data:
    """scikit-learn's digits, 14 x 14 pixels, to train on and held out."""
    from digits import small

    train, heldout = ((avg_pool2d(images, 2), labels) for images, labels in small())
    return train, {"heldout": heldout}


def accuracy(model: Model, x: Tensor, labels: Tensor) -> float:
    """In 0..1."""
    return percent(model, x, labels) / 100


def perplexity(model: Model, x: Tensor, following: Tensor) -> float:
    return math.exp(text.score(model, x, following))


# Plain SGD, as in the paper's Algorithm 1; its rate for an LSTM is 22. Of the rates 1, 3, 6, 12 and
# 22 this is the best for dense SGD.
LSTM = Learnt(
    Task("LSTM", partial(Reader, len(CHARACTERS), 96), TEXT, 8, perplexity, text.loss),
    12.0, (106.7, 109.4, 105.7), more_is_better=False, momentum=0.0,
)  # fmt: skip


def one_cycle(step: int, steps: int) -> float:
    """Up and down in halves of a cosine, as torch's ``OneCycleLR``."""
    top, last = WARM * steps - 1, steps - 1
    if step <= top:
        return START + (1 - START) * (1 - math.cos(math.pi * step / top)) / 2
    return END + (1 - END) * (1 + math.cos(math.pi * (step - top) / (last - top))) / 2


def clipped(momentum: float) -> Callable[[Iterable[nn.Parameter]], SGD]:
    """SGD, which clips the norm of the gradients."""

    def build(parameters: Iterable[nn.Parameter]) -> SGD:
        own = list(parameters)
        optimizer = SGD(own, lr=0.0, momentum=momentum)

        def clip(*_: object) -> None:
            nn.utils.clip_grad_norm_(own, 1.0)

        optimizer.register_step_pre_hook(clip)
        return optimizer

    return build


def train(
    learnt: Learnt, name: str, algorithm: offbeat.Algorithm, steps: int, workers: int, seed: int
) -> float:
    """The score of the average model at the end of one run."""
    corrected = getattr(algorithm.gradients, "momentum", 0.0) > 0
    build, (part, scored) = clipped(0.0 if corrected else learnt.momentum), learnt.task.data()
    task, found = replace(learnt.task, optimizer=build, data=lambda: (part, {})), []

    def look(replica: offbeat.Replica, step: int) -> None:
        if step + 1 == steps:
            with replica.consensus():
                if replica.world.rank == 0:
                    replica.model.eval()
                    found.append(task.score(replica.model, *scored["heldout"]))

    case = Case(name, task, algorithm, workers, steps, learnt.lr, one_cycle, seed)
    in_threads(case, after=look)
    console.print(f"{case}: {found[0]:.4g}", style="dim")
    return found[0]
