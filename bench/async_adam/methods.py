"""Asynchronous Adam, and the serial baselines SGD and SVRG."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numba import njit
from sklearn.utils import check_random_state

from bench.async_adam.sparse_problem import BATCH, L2, Problem, Vector
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


@njit(nogil=True, fastmath=True)
def sgd_pass(indptr, indices, data, y, order, theta, alpha, mu, anchor):  # type: ignore[no-untyped-def]
    """One pass of SGD, or of SVRG where ``mu`` is the full gradient at ``anchor``."""
    share = np.float32(1.0 / BATCH)
    variance_reduced = mu.shape[0] > 0
    for first in range(0, order.shape[0] - BATCH + 1, BATCH):
        errors = np.empty(BATCH, np.float32)
        for b in range(BATCH):
            z = np.float32(0)
            old = np.float32(0)
            row = order[first + b]
            for q in range(indptr[row], indptr[row + 1]):
                z += data[q] * theta[indices[q]]
                if variance_reduced:
                    old += data[q] * anchor[indices[q]]
            errors[b] = 1 / (1 + np.exp(-z)) - y[row]
            if variance_reduced:
                errors[b] -= 1 / (1 + np.exp(-old)) - y[row]
        theta *= np.float32(1 - alpha * L2)
        if variance_reduced:
            theta -= alpha * mu
        for b in range(BATCH):
            row = order[first + b]
            for q in range(indptr[row], indptr[row + 1]):
                theta[indices[q]] -= alpha * share * errors[b] * data[q]


def baseline(*, svrg: bool) -> Method:
    """SGD, or SVRG with a full gradient before every pass (Johnson and Zhang 2013)."""
    nothing = np.empty(0, np.float32)

    def begin(problem: Problem, alpha: float) -> Training:
        x, y, random = problem.x, problem.y, check_random_state(0)
        theta = np.zeros(x.shape[1], np.float32)

        def go(count: int) -> None:
            mu, anchor = nothing, nothing
            for _ in range(count):
                if svrg:
                    anchor = theta.copy()
                    error = 1 / (1 + np.exp(-(x @ anchor))) - y
                    mu = (x.T @ error / x.shape[0]).astype(np.float32)
                order = random.permutation(x.shape[0])
                rate = np.float32(alpha)
                sgd_pass(x.indptr, x.indices, x.data, y, order, theta, rate, mu, anchor)

        none = np.arange(0)
        sgd_pass(x.indptr, x.indices, x.data, y, none, theta, np.float32(0), nothing, nothing)
        return Training("SVRG" if svrg else "SGD", alpha, theta, go)

    return begin
