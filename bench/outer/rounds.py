"""Rounds of training under several methods, each for the same number of seconds."""

from dataclasses import dataclass
from statistics import fmean, median

import numpy as np
from torch import nn

from bench.harness import attached
from bench.harness.attached import Attached, Build, adamw
from bench.harness.gpt import gpt_with_heldout
from bench.harness.training import Found, Times, Training, times

EVERY = 8  # steps of a turn, between two exchanges
# Averages are sent after step 8; those of half a model after 4, for three more steps. Turns that
# begin 7 steps after a multiple of eight leave nothing in flight between them.
LEAD = 8 + 7


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
        return min(sum(each.steps) for found in self.rounds for each in found.values())

    def step(self, name: str) -> float:
        """Seconds of a step."""
        return median(found[name].step for found in self.rounds)

    def bytes(self, name: str) -> float:
        """Bytes that leave a node in a step."""
        return median(found[name].bytes for found in self.rounds)

    def steps(self, name: str) -> float:
        """The number of steps in the budget of seconds."""
        return median(steps_after(found[name], self.seconds) for found in self.rounds)

    def ratio(self, name: str, other: str) -> float:
        """The time of a step relative to the other's in the same turns."""
        return median(found[name].over(found[other]) for found in self.rounds)

    def loss_in_time(self, name: str) -> float:
        """The held-out loss after the budget of seconds."""
        ends = ((found[name], steps_after(found[name], self.seconds)) for found in self.rounds)
        return fmean(loss_after(*end) for end in ends)

    def loss_in_steps(self, name: str) -> float:
        """The held-out loss after the common number of steps."""
        return fmean(loss_after(found[name], self.common_steps) for found in self.rounds)


def steps_after(course: Times, seconds: float) -> float:
    """The number of steps made in so many seconds; the lead is training too."""
    return float(np.interp(seconds, np.cumsum(course.seconds), np.cumsum(course.steps)))


def loss_after(course: Times, steps: float) -> float:
    """The held-out loss after a number of steps, between two evaluations in proportion."""
    return float(np.interp(steps, np.cumsum(course.steps), course.losses))


def race(methods: tuple[str, ...], seconds: float, nodes: int, rate: str, rounds: int) -> Rounds:
    """Train a GPT in rounds, one after the other."""
    training = Training(
        gpt_with_heldout, methods, EVERY, seconds=seconds, lead=LEAD, optimizer=adamw,
        attach=attach,
    )  # fmt: skip
    return Rounds([times(training, nodes, rate) for _ in range(rounds)], seconds)


def attach(method: str, model: nn.Module, build: Build) -> Attached:
    """A method of torchft, or what every bench has."""
    if method.startswith("torchft"):
        from bench.outer import managed  # torchft may be missing

        return managed.attach(method, model, build)
    return attached.attach(method, model, build)
