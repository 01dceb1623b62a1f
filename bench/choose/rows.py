"""Many workers of a task as rows of one tensor: what they learn, without their time."""

from collections.abc import Iterable
from functools import partial
from math import inf

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer

import offbeat
from bench.choose.tasks import LOOK, MOST, STEPS, WORST, Course, constant
from bench.harness import console
from bench.harness.case import Model, Task
from offbeat.testing.virtual import VirtualWorkers


def follow_rows(
    task: Task, recipe: str, rate: float, seed: int, target: float, workers: int, most: int = MOST
) -> Course:
    """Train until the target is reached, or for ``most`` steps; without a target as long as ddp."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model, optimizers, course = task.net(), list[Optimizer](), Course([])
    (x, y), scored = task.data()

    def build(parameters: Iterable[nn.Parameter]) -> Optimizer:
        optimizers.append(task.optimizer(parameters))
        return optimizers[0]

    def loss(of: Model, text: Tensor, following: Tensor) -> Tensor:
        return task.loss(of(text), following)

    rows = VirtualWorkers(offbeat.algorithm(recipe), model, size=workers, optimizer=build)
    random = torch.Generator().manual_seed(seed)
    steps = STEPS if target == -inf else most
    with sdpa_kernel(SDPBackend.MATH):  # the others have no rule for rows
        for step in range(steps):
            optimizers[0].param_groups[0]["lr"] = rate * constant(step, steps)
            chosen = torch.randint(len(x), (workers, task.batch), generator=random)
            rows.step(loss, x[chosen], y[chosen])
            if (step + 1) % LOOK == 0:
                mean = {name: stacked.mean(0) for name, stacked in rows.parameters().items()}
                found = task.score(partial(functional_call, model, mean), *scored["heldout"])
                course.losses.append(min(WORST, found) if found == found else WORST)
                if course.losses[-1] <= target or course.losses[-1] == WORST:
                    break
    console.print(f"{workers} workers, {recipe}, {rate:g}: {course.losses[-1]:.4f}", style="dim")
    return course
