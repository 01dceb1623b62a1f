"""Asynchronous Adam as a method that is trained pass by pass: by threads, or by workers in turns.

Workers in turns all compute at one theta before any of them updates it. This is what asynchrony
does to the course of a training, whatever the hardware: a gradient is as old as with that many
threads on as many cores, none of which waits for a core. The kernels are the library's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numba import njit

from bench.async_adam.sparse_problem import BATCH, L2, Problem, Vector
from offbeat.hogwild import AsyncAdamClassifier
from offbeat.hogwild.logistic.descent import Descent
from offbeat.kernels.logistic import (
    apply_binary,
    binary_errors,
    binary_gradient,
    draw_batch,
    step_size,
)
from offbeat.kernels.logistic_memory import Data, Settings

SERIAL = "serial Adam"


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
) -> tuple[Descent, tuple[Data, Vector, Settings]]:
    """A model at its start, and what its descent needs for a pass."""
    model = AsyncAdamClassifier(
        moments, n_jobs=workers, l2=L2, learning_rate=alpha,  # type: ignore[arg-type]
        fit_intercept=False, random_state=seed,
    )  # fmt: skip
    model._begin(problem.x, np.unique(problem.y))
    return model.descent_, model._problem(problem.x, problem.y)


def adam(moments: str = "shared", threads: int = 1, seed: int = 0) -> Method:
    """Asynchronous Adam, serial with one thread; all threads run, however short a run is."""

    def start(problem: Problem, alpha: float) -> Training:
        descent, parts = begin(problem, moments, threads, alpha, seed)
        if threads > 1:
            descent.pad()
        descent.passes(*parts, 0)  # compiles
        label = f"{moments}, {threads} threads" if threads > 1 else SERIAL
        return Training(label, alpha, descent.theta[:-1, 0], partial(descent.passes, *parts))

    return start


def turns(moments: str, workers: int, seed: int = 0) -> Method:

    def start(problem: Problem, alpha: float) -> Training:
        descent, parts = begin(problem, moments, workers, alpha, seed)
        label = f"{moments}, {workers} workers" if workers > 1 else SERIAL
        return Training(label, alpha, descent.theta[:-1, 0], partial(_passes, descent, *parts))

    return start


def _passes(to: Descent, x: Data, decay: np.ndarray, settings: Settings, count: int) -> None:
    to.shared[:, 1] = decay
    rows = len(x.indptr) - 1
    hands = to._deal(rows, BATCH, to.workers)
    to.counts[:, 0], to.counts[:, 2] = rows, np.arange(to.workers)
    longest = int(np.diff(x.indptr).max())
    touched = np.zeros((to.workers, BATCH * longest + 64), np.uint32)
    memories = tuple(to._memory(w) for w in range(to.workers))
    threads = tuple(to._thread(own, hands.copy()) for own in to.counts)
    _in_turns(x, memories, threads, settings, touched, count * (rows // BATCH // to.workers))


@njit(nogil=True)
def _in_turns(x, memories, threads, settings, touched, rounds):  # type: ignore[no-untyped-def]
    """As many rounds; in each, every worker makes one update."""
    workers, features = len(memories), memories[0].shared.shape[0] // memories[0].width
    g = np.zeros((workers, features), memories[0].shared.dtype)
    errors = np.empty(settings.batch, g.dtype)
    rows = np.empty(settings.batch, np.uint32)
    counts = np.empty(workers, np.uint64)
    for _ in range(rounds):
        for w in range(workers):
            draw_batch(threads[w], rows)
            binary_errors(x, memories[w], rows, settings.intercept, errors)
            counts[w] = binary_gradient(x, rows, settings.intercept, errors, g[w], touched[w])
        for w in range(workers):
            alpha = g.dtype.type(step_size(threads[w], settings, None))
            apply_binary(memories[w], settings, None, touched[w], counts[w], g[w], alpha)
