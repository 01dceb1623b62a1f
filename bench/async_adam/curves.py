"""Loss over passes and over seconds of methods that take turns, and their tuning."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import ceil

from bench.async_adam.methods import Method
from bench.async_adam.sparse_problem import Problem
from bench.harness.turns import in_turns, over, seconds_of

TURNS = 11  # timed runs of each method
LONG = 0.15  # seconds of a run, at least: long beside the start of a thread


@dataclass(frozen=True)
class Curve:
    """Training loss and test error after each pass, and how long an undisturbed pass takes."""

    label: str
    alpha: float
    loss: list[float]
    error: list[float]
    pace: float = float("nan")  # seconds per pass

    def passes_to(self, loss: float) -> float:
        """Passes until the loss was reached, interpolated; inf for never."""
        for k, (before, after) in enumerate(pairwise(self.loss)):
            if after <= loss:
                return k + max(0.0, (before - loss) / max(before - after, 1e-12))
        return float("inf")

    def seconds_to(self, loss: float) -> float:
        return self.passes_to(loss) * self.pace


def record(method: Method, problem: Problem, alpha: float, passes: int) -> Curve:
    training, looks = method(problem, alpha), []
    for number in range(passes + 1):
        if number:
            training.go(1)
        looks.append((problem.loss(training.theta), problem.error(training.theta)))
    return Curve(training.label, alpha, *map(list, zip(*looks, strict=True)))


def tuned(
    method: Method, problem: Problem, passes: int, grid: Sequence[float],
    by: Callable[[Curve], float] = lambda curve: curve.loss[-1],
) -> Curve:  # fmt: skip
    """The curve of the step size that is best: with the lowest loss at the end."""
    return min((record(method, problem, alpha, passes) for alpha in grid), key=by)


def timed(curves: list[Curve], methods: Sequence[Method], problem: Problem) -> list[Curve]:
    """The curves with their paces, by runs of all methods in turns.

    The first method's pace is that of its fastest run, the others' are multiples of it, by the
    median over turns. Fastest runs of each would be of different moments, between which the speed
    of the machine may have changed.
    """
    runs = [method(problem, curve.alpha) for method, curve in zip(methods, curves, strict=True)]
    passes = ceil(LONG / seconds_of(partial(runs[0].go, 1)))
    found = in_turns({k: partial(run.go, passes) for k, run in enumerate(runs)}, TURNS)
    paces = [min(found[0]) / passes * over(found[k], found[0]) for k in found]
    return [replace(curve, pace=pace) for curve, pace in zip(curves, paces, strict=True)]
