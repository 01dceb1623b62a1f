"""Training under several methods in turns, on emulated nodes: seconds, bytes and losses.

All methods are attached in the same processes and take turns of eight steps, so that other load on
the machine is shared. A method whose turns have taken its budget of seconds is left out.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bench.harness import files
from bench.harness.console import console
from bench.harness.ranks import on_nodes
from bench.outer.contender import Contender, recipe, texts

TURN = 8  # steps
LEAD = 8  # steps before the first turn, beside those of the phase


@dataclass
class Course:
    """The turns of one method: seconds of the slowest rank, bytes of a node, loss after each.

    The first turn is the lead, which counts as training but not for the time of a step.
    """

    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @property
    def step(self) -> float:
        """Seconds of a step, the median over turns."""
        return median(self._paces)

    @property
    def bytes(self) -> float:
        """Bytes that leave a node in a step, the median over turns."""
        return median(self.sent[1:]) / TURN

    @property
    def _paces(self) -> list[float]:
        return [seconds / TURN for seconds in self.seconds[1:]]

    def over(self, other: "Course") -> float:
        """The ratio of both times of a step, the median over the turns that both have taken."""
        return median(a / b for a, b in zip(self._paces, other._paces, strict=False))

    def is_over(self, seconds: float) -> bool:
        """Whether the turns have taken so many seconds; there is one turn at least."""
        return len(self.steps) > 1 and sum(self.seconds) >= seconds

    def steps_after(self, seconds: float) -> float:
        """The number of steps made in so many seconds."""
        return float(np.interp(seconds, np.cumsum(self.seconds), np.cumsum(self.steps)))

    def loss_after(self, steps: float) -> float:
        """The held-out loss after a number of steps, between two evaluations in proportion."""
        return float(np.interp(steps, np.cumsum(self.steps), self.losses))


Found = dict[str, Course]


@dataclass(frozen=True)
class Race:
    """What takes turns: recipes, and methods of torchft; each for so many seconds."""

    methods: tuple[str, ...]
    seconds: float
    managed: bool = False  # whether methods of torchft are among them


@dataclass(frozen=True)
class Rounds:
    """What was found in all rounds: of each figure the median of rounds, of losses the mean."""

    rounds: list[Found]
    seconds: float  # of each method in each round

    @property
    def names(self) -> list[str]:
        """The methods, in the order of their turns."""
        return list(self.rounds[0])

    @property
    def common_steps(self) -> int:
        """The number of steps that all methods have made in all rounds."""
        return min(sum(course.steps) for found in self.rounds for course in found.values())

    def step(self, name: str) -> float:
        """Seconds of a step."""
        return median(found[name].step for found in self.rounds)

    def bytes(self, name: str) -> float:
        """Bytes that leave a node in a step."""
        return median(found[name].bytes for found in self.rounds)

    def steps(self, name: str) -> float:
        """The number of steps in the budget of seconds."""
        return median(found[name].steps_after(self.seconds) for found in self.rounds)

    def ratio(self, name: str, other: str) -> float:
        """The time of a step relative to the other's in the same turns."""
        return median(found[name].over(found[other]) for found in self.rounds)

    def loss_in_time(self, name: str) -> float:
        """The held-out loss after the budget of seconds."""
        return fmean(c.loss_after(c.steps_after(self.seconds)) for c in self._courses(name))

    def loss_in_steps(self, name: str) -> float:
        """The held-out loss after the common number of steps."""
        return fmean(c.loss_after(self.common_steps) for c in self._courses(name))

    def _courses(self, name: str) -> list[Course]:
        return [found[name] for found in self.rounds]


def race(name: str, question: Race, nodes: int, rate: str, rounds: int, resume: bool) -> Rounds:
    """Run the rounds, one after the other, and record each under ``name``.

    With ``resume`` those that are recorded do not run again.
    """
    found: list[Found] = []
    for number in range(1, rounds + 1):
        path = files.raw(f"{name}-{question.seconds:g}s-round{number}")
        if not (resume and path.exists()):
            console.print(f"round {number} of {rounds}")
            run: Found = on_nodes(alternate, question, nodes, rate=rate)
            path.write_text(json.dumps({key: asdict(course) for key, course in run.items()}))
        read: dict[str, Any] = json.loads(path.read_text("utf-8"))
        found.append({key: Course(**each) for key, each in read.items()})
    return Rounds(found, question.seconds)


def alternate(question: Race) -> Found:
    """Take turns, on every rank."""
    training, heldout = texts()
    contenders = [enter(name, question) for name in question.methods]
    found = {each.name: Course() for each in contenders}
    while waiting := [c for c in contenders if not found[c.name].is_over(question.seconds)]:
        for contender in waiting:
            turn(contender, found[contender.name], training)
            found[contender.name].losses.append(contender.loss(heldout))
        if dist.get_rank() == 0:
            print(progress(found, question.seconds), flush=True)
    for contender in contenders:
        contender.close()
    return found


def enter(name: str, question: Race) -> Contender:
    """Attach one method."""
    if question.managed:
        from bench.outer import managed  # torchft may be missing

        if name in managed.METHODS:
            return managed.managed(name)
    return recipe(name)


def turn(contender: Contender, course: Course, text: Tensor) -> None:
    """Train for a turn, which all ranks start together; the first one is the lead."""
    steps = TURN if course.steps else LEAD + contender.phase
    dist.barrier()
    before, began = contender.sent(), time.perf_counter()
    for _ in range(steps):
        contender.step(text)
    taken = torch.tensor([time.perf_counter() - began, contender.sent() - before])
    dist.barrier()
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    seconds, sent = taken.tolist()
    course.steps.append(steps)
    course.seconds.append(seconds)
    course.sent.append(sent)


def progress(found: Found, budget: float) -> str:
    """How far all are, in one line."""
    done = sum(min(budget, sum(course.seconds)) for course in found.values())
    share = done / budget / len(found)
    slowest: Sequence[str] = [f"{c.seconds[-1] / c.steps[-1]:.2f}" for c in found.values()]
    return f"{share:.0%}; seconds of a step in the last turns: {' '.join(slowest)}"
