"""Rounds of training a GPT under several methods, each for the same number of seconds."""

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
    def common_steps(self) -> int:
        """The number of steps that all methods have made in all rounds."""
        return min(sum(each.steps) for found in self.rounds for each in found.values())

    def of(self, name: str) -> list[Times]:
        return [found[name] for found in self.rounds]

    def step(self, name: str) -> float:
        return median(each.step for each in self.of(name))

    def bytes(self, name: str) -> float:
        """Bytes that leave a node in a step."""
        return median(each.bytes for each in self.of(name))

    def ratio(self, name: str, other: str) -> float:
        return median(found[name].over(found[other]) for found in self.rounds)

    def steps(self, name: str) -> float:
        return median(steps_after(each, self.seconds) for each in self.of(name))

    def loss_in_time(self, name: str) -> float:
        return fmean(loss_after(e, steps_after(e, self.seconds)) for e in self.of(name))

    def loss_in_steps(self, name: str) -> float:
        return fmean(loss_after(each, self.common_steps) for each in self.of(name))


def steps_after(course: Times, seconds: float) -> float:
    """The number of steps made in so many seconds; the lead is training too."""
    return float(np.interp(seconds, np.cumsum(course.seconds), np.cumsum(course.steps)))


def loss_after(course: Times, steps: float) -> float:
    """The held-out loss after a number of steps, between two evaluations in proportion."""
    return float(np.interp(steps, np.cumsum(course.steps), course.losses))


def race(methods: tuple[str, ...], seconds: float, nodes: int, rate: str, rounds: int) -> Rounds:
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
