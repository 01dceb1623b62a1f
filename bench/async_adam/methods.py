"""Asynchronous Adam as a method that is trained pass by pass."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bench.async_adam.sparse_problem import L2, Problem, Vector
from offbeat.hogwild import AsyncAdamClassifier
from offbeat.kernels.logistic_memory import Data, Settings


@dataclass
class Training:
    """A model at its start, and a function that trains it for a number of passes."""

    label: str
    alpha: float
    theta: Vector
    go: Callable[[int], object]


Method = Callable[[Problem, float], Training]


def begin(
    problem: Problem, moments: str, workers: int, alpha: float, seed: int
) -> tuple[AsyncAdamClassifier, tuple[Data, Vector, Settings]]:
    """A model at its start, and what its descent needs for a pass."""
    model = AsyncAdamClassifier(
        moments,  # type: ignore[arg-type]
        n_jobs=workers,
        l2=L2,
        learning_rate=alpha,
        fit_intercept=False,
        random_state=seed,
    )
    model._begin(problem.x, np.unique(problem.y))
    return model, model._problem(problem.x, problem.y)


def adam(moments: str = "shared", threads: int = 1, seed: int = 0) -> Method:
    """Asynchronous Adam, serial with one thread; all threads run, however short a run is."""

    def start(problem: Problem, alpha: float) -> Training:
        model, parts = begin(problem, moments, threads, alpha, seed)
        if threads > 1:
            model.descent_.pad()
        model.descent_.passes(*parts, 0)  # compiles
        label = f"{moments}, {threads} threads" if threads > 1 else "serial Adam"
        theta = model.descent_.theta[:-1, 0]
        return Training(label, alpha, theta, lambda count: model.descent_.passes(*parts, count))

    return start
