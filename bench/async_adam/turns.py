"""Many workers on few cores, in turns: all compute at one theta before any of them updates it.

What asynchrony does to the course of a training, whatever the hardware: a gradient is as old as
with that many threads on as many cores, none of which waits for a core. The kernels are those of
:class:`offbeat.hogwild.AsyncAdamClassifier`.
"""

import numpy as np
from numba import njit

from bench.async_adam.methods import Method, Training, begin
from bench.async_adam.sparse_problem import BATCH, Problem
from offbeat.hogwild.logistic.descent import Descent
from offbeat.kernels.logistic import (
    apply_binary,
    binary_errors,
    binary_gradient,
    draw_batch,
    step_size,
)
from offbeat.kernels.logistic_memory import Data, Settings


@njit(nogil=True)
def in_turns(x, memories, threads, settings, touched, rounds):  # type: ignore[no-untyped-def]
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


def turns(moments: str, workers: int, seed: int = 0) -> Method:
    """Asynchronous Adam by ``workers`` in turns."""

    def start(problem: Problem, alpha: float) -> Training:
        model, (x, decay, settings) = begin(problem, moments, workers, alpha, seed)
        memory: Descent = model.descent_
        label = f"{moments}, {workers} workers" if workers > 1 else "serial Adam"

        def go(count: int) -> None:
            _pass(memory, x, decay, settings, count)

        return Training(label, alpha, memory.theta[:-1, 0], go)

    return start


def _pass(to: Descent, x: Data, decay: np.ndarray, settings: Settings, count: int) -> None:
    to.shared[:, 1] = decay
    rows = len(x.indptr) - 1
    hands = to._deal(rows, BATCH, to.workers)
    to.counts[:, 0], to.counts[:, 2] = rows, np.arange(to.workers)
    longest = int(np.diff(x.indptr).max())
    touched = np.zeros((to.workers, BATCH * longest + 64), np.uint32)
    in_turns(
        x,
        tuple(to._memory(w) for w in range(to.workers)),
        tuple(to._thread(own, hands.copy()) for own in to.counts),
        settings, touched, count * (rows // BATCH // to.workers),
    )  # fmt: skip
