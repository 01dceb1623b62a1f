"""Training under several methods in turns, on emulated nodes: seconds, bytes and losses.

All methods are attached in the same processes and train copies of one model.
"""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from math import inf
from statistics import median
from typing import Unpack

import torch
import torch.distributed as dist

from bench.harness import turns
from bench.harness.attached import Attach, Attached, Build, Task, attach, momentum
from bench.harness.ranks import on_nodes
from offbeat.lab.network.links import LinkOptions


@dataclass(frozen=True)
class Training:
    """What is trained under which methods, and for how long. Its functions are those of modules.

    A method has had its turns after ``rounds``, or as soon as they have taken ``seconds``.
    """

    task: Callable[[], Task]
    methods: tuple[str, ...]
    steps: int  # of a turn
    rounds: float = inf
    seconds: float = inf
    lead: int = 3  # steps before the first turn
    optimizer: Build = momentum
    attach: Attach = attach


@dataclass
class Times:
    """The turns of one method. The first one is the lead: no figure of a step counts it."""

    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of the slowest rank
    backward: list[float] = field(default_factory=list)  # share of the seconds, mean of the ranks
    sent: list[float] = field(default_factory=list)  # bytes of a rank, at most
    losses: list[float] = field(default_factory=list)  # on held-out data, after each turn
    core: list[float] = field(default_factory=list)  # seconds of a core, mean of the ranks

    def of_a_step(self, totals: list[float]) -> list[float]:
        """In each turn."""
        return [total / n for total, n in zip(totals[1:], self.steps[1:], strict=True)]

    @property
    def paces(self) -> list[float]:
        """Seconds of a step in each turn."""
        return self.of_a_step(self.seconds)

    @property
    def cores(self) -> list[float]:
        """Seconds of a core that a rank needs for a step in each turn."""
        return self.of_a_step(self.core)

    @property
    def step(self) -> float:
        """Seconds of a step, the median over turns."""
        return median(self.paces)

    @property
    def bytes(self) -> float:
        """Bytes sent in a step, the median over turns; NaN where they are not counted."""
        return median(self.of_a_step(self.sent))

    @property
    def share(self) -> float:
        """The share of the backward pass, the median over turns."""
        return median(self.backward[1:])

    def over(self, other: "Times") -> float:
        """The ratio of both times of a step, the median over the rounds that both have run."""
        return turns.over(self.paces, other.paces)

    def is_due(self, training: Training) -> bool:
        """Whether another turn follows; there is one at least."""
        made = len(self.steps) - 1
        return made < 1 or (made < training.rounds and sum(self.seconds) < training.seconds)


Found = dict[str, Times]  # by method


def times(
    training: Training, nodes: int, rate: str | None, procs: int = 1, gpu: bool = False,
    **far: Unpack[LinkOptions],
) -> Found:  # fmt: skip
    """All methods in turns, in processes that start once.

    ``far`` are further options of :class:`offbeat.lab.Lab`.
    Raises RuntimeError if one of them fails.
    """
    found: Found = on_nodes(alternate, training, nodes, procs, rate, gpu, **far)
    return found


def alternate(training: Training) -> Found:
    """Take turns, on every rank."""
    torch.manual_seed(0)
    task = training.task()
    runs = {
        method: training.attach(method, copy.deepcopy(task.model), training.optimizer)
        for method in training.methods
    }
    found = {method: Times() for method in runs}
    for number in count():
        due = [method for method in runs if found[method].is_due(training)]
        if not due:
            break
        for method in turns.turn_of(due, number):
            steps = training.steps if number else runs[method].lead or training.lead
            turn(runs[method], task, steps, found[method])
        if dist.get_rank() == 0:
            last = (f"{each.seconds[-1] / each.steps[-1]:.3f}" for each in found.values())
            print(f"turn {number}, seconds of a step: {' '.join(last)}", flush=True)
    for run in runs.values():
        run.finish()
        run.close()
    return found


def turn(run: Attached, task: Task, steps: int, found: Times) -> None:
    """Train for a turn, which all ranks start together."""
    dist.barrier()
    before, core, began = run.sent(), time.process_time(), time.perf_counter()
    backward = sum(run.step(task.loss) for _ in range(steps))
    task.ended()
    seconds = time.perf_counter() - began
    most = torch.tensor([seconds, run.sent() - before], dtype=torch.float64)
    means = torch.tensor([backward / seconds, time.process_time() - core])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    dist.all_reduce(means)
    found.steps.append(steps)
    totals = *most.tolist(), *(means / dist.get_world_size()).tolist()
    series = found.seconds, found.sent, found.backward, found.core
    for values, total in zip(series, totals, strict=True):
        values.append(total)
    if task.heldout is not None:
        found.losses.append(run.evaluate(task.heldout))
