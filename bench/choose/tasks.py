"""Three small tasks with their grids of learning rates, and a look at a run while it goes on."""

import time
from dataclasses import dataclass
from functools import cache, partial
from math import inf
from statistics import median

import digits
import digits_cnn
import torch
from char_gpt import CHARACTERS, GPT
from torch import Tensor
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import AdamW

import offbeat
from bench.harness import console, text
from bench.harness.case import SGD, Case, Data, Model, Task
from bench.harness.rows import trained
from bench.harness.seeds import in_threads
from bench.lags.networks import Reader
from bench.lags.training import LENGTH, TEXT

WORKERS, STEPS, MOST, LOOK = 4, 160, 320, 10  # steps of ddp, of others at most, between looks
WORST = 99.0  # the loss of a run that has diverged
IN_NAMES = torch.tensor([c.isalpha() or c == "_" for c in CHARACTERS])


@torch.no_grad()
def identifiers(model: Model, x: Tensor, following: Tensor) -> float:
    """In % of the characters that follow two of an identifier and belong to it, those foretold."""
    inside = IN_NAMES[x[:, :-1]] & IN_NAMES[x[:, 1:]] & IN_NAMES[following[:, 1:]]
    right = model(x)[:, 1:].argmax(-1) == following[:, 1:]
    return 100 * right[inside].double().mean().item()


@cache
def images() -> Data:
    return digits.generated(8000, seed=0), {"heldout": digits.generated(500, seed=1)}


def constant(step: int, steps: int) -> float:
    """Warmed up, then constant: what a step is worth does not depend on the end of the run."""
    return min(1.0, (step + 1) / 20)


ADAM = partial(AdamW, lr=0.0)
GPT_64, LSTM = partial(GPT, 64, 2, 4, LENGTH), partial(Reader, len(CHARACTERS), 96)
TASKS = (
    Task("GPT", GPT_64, TEXT, 8, text.score, text.loss, ADAM),
    Task("digits", digits_cnn.net, images, 8, text.score, text.loss, SGD),
    Task("LSTM", LSTM, TEXT, 8, text.score, text.loss, ADAM),
)
RATES = {"GPT": (1e-3, 3e-3, 9e-3), "digits": (0.01, 0.03, 0.09), "LSTM": (1e-3, 3e-3, 9e-3)}


def step_alone(task: Task) -> list[float]:
    """Seconds of forward, backward and optimizer, of a processor that does nothing else."""
    torch.set_num_threads(1)
    ((x, y), _), model, clock, times = task.data(), task.net(), time.thread_time, []
    optimizer = task.optimizer(model.parameters())
    with torch.autograd.set_multithreading_enabled(False):  # the clock is that of this thread
        for _ in range(30):
            began = clock()
            of = task.loss(model(x[: task.batch]), y[: task.batch])
            forward = clock()
            of.backward()
            backward = clock()
            optimizer.step()
            optimizer.zero_grad()
            times.append((forward - began, backward - forward, clock() - backward))
    return [median(part) for part in zip(*times, strict=True)]


@dataclass
class Course:
    """Held-out losses of the average model, one each LOOK steps, and what a GPT foretells."""

    losses: list[float]
    identifiers: float | None = None  # at the first look at which the target is reached

    def is_short(self, target: float, most: int) -> bool:
        """Whether it ended before its target and before ``most`` steps, and had not diverged."""
        is_missed = -inf < target < min(self.losses) and self.losses[-1] < WORST
        return is_missed and len(self.losses) * LOOK < most


def follow(task: Task, recipe: str, rate: float, seed: int, target: float) -> Course:
    """Train until the target is reached, or for as many steps as are allowed."""
    steps = STEPS if recipe == "ddp()" else MOST
    case = Case(recipe, task, offbeat.algorithm(recipe), WORKERS, steps, rate, constant, seed)
    heldout, course = task.data()[1]["heldout"], Course([])

    def look(replica: offbeat.Replica, step: int) -> bool:
        past, rest = divmod(step + 1, LOOK)
        if rest:
            return False
        # Ranks decide by earlier losses, which all see: rank 0 wrote them before this average.
        with replica.consensus():
            if replica.world.rank == 0:
                replica.model.eval()
                course.losses.append(min(WORST, task.score(replica.model, *heldout)))
                is_last = course.losses[-1] <= target or step + 1 == steps
                if is_last and course.identifiers is None and task.name == "GPT":
                    course.identifiers = identifiers(replica.model, *heldout)
                replica.model.train()
        return any(each <= target for each in course.losses[: past - 1])

    try:
        in_threads(case, after=look)
    except ValueError as error:  # not finite: the run has diverged
        course.losses.append(WORST)
        print(f"{case}: {error}"[:200])
    return course


def follow_rows(
    task: Task, recipe: str, rate: float, seed: int, target: float, workers: int, most: int = MOST
) -> Course:
    """The same of many workers as rows of one tensor; without a target as long as ddp."""
    steps = STEPS if target == -inf else most
    case = Case(recipe, task, offbeat.algorithm(recipe), workers, steps, rate, constant, seed)
    heldout, losses = task.data()[1]["heldout"], list[float]()
    with sdpa_kernel(SDPBackend.MATH):  # the others have no rule for rows
        for step, rows in enumerate(trained(case), 1):
            if step % LOOK == 0:
                mean = {name: stacked.mean(0) for name, stacked in rows.parameters().items()}
                found = task.score(partial(functional_call, rows.model, mean), *heldout)
                losses.append(min(WORST, found) if found == found else WORST)
                if losses[-1] <= target or losses[-1] == WORST:
                    break
    console.print(f"{case}, {rate:g}: {losses[-1]:.4f}", style="dim")
    return Course(losses)
