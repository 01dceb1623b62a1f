"""The benches of asynchronous Adam: times that are read off correctly, workers in turns."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from bench.async_adam import curves, methods
from bench.async_adam import sparse_problem as sparse
from bench.async_adam.methods import Training
from bench.harness import Effect, turns

from reference.async_adam import async_adam


def test_a_loss_is_reached_between_two_looks() -> None:
    curve = curves.Curve("some", 0.1, [1.0, 0.5, 0.25], [0.5, 0.4, 0.3], pace=2.0)
    reached = [curve.passes_to(loss) for loss in (0.5, 0.375, 0.25, 0.2)]
    assert reached == pytest.approx([1.0, 1.5, 2.0, float("inf")])
    assert curve.seconds_to(0.375) == pytest.approx(3.0)


def test_methods_are_compared_within_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is twice and three times as slow in some turns, and at a time only for one."""
    clock, slower = [0.0], iter([1.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 3.0, 1.0, 1.0, 1.0])

    def method(takes: float) -> Any:
        def go(count: int) -> None:
            clock[0] += count * takes * next(slower)

        return lambda problem, alpha: SimpleNamespace(go=go)

    monkeypatch.setattr(curves, "TURNS", 5)
    monkeypatch.setattr(turns, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    plain = curves.Curve("some", 0.1, [], [])
    one, two = curves.timed([plain, plain], [method(0.5), method(2.0)], None)
    assert (one.pace, two.pace) == (0.5, 2.0)


def test_workers_in_turns_compute_at_one_theta_and_update_after_each_other() -> None:
    """Two batches of all rows: a worker that waited for the other would compute at its theta."""
    problem, alpha = sparse.generate(0.5, n=2 * sparse.BATCH, d=6), 0.1
    training = methods.turns("private", 2, seed=3)(problem, alpha)
    descent, (_, decay, _) = methods.begin(problem, "private", 2, alpha, 3)
    hands = descent._deal(2 * sparse.BATCH, sparse.BATCH, 2)
    theta, steps = np.zeros(6), []
    for t in (1, 2):
        seen = theta
        for worker in range(2):
            rows = hands[(worker + t) % 2]
            x, y = problem.x[rows].toarray(), problem.y[rows]
            g = x.T @ (1 / (1 + np.exp(-x @ seen)) - y) / sparse.BATCH
            steps.append((worker, t, g + decay[:6] * theta))  # the l2 term is that of the update
            theta, *_ = async_adam(np.zeros(6), steps, workers=2, private=True, alpha=alpha)
    training.go(2)
    np.testing.assert_allclose(training.theta, theta, rtol=0, atol=1e-5)


def test_a_difference_counts_beyond_two_standard_errors() -> None:
    near, far = Effect.mean([1.0, 2.0, 3.0]), Effect.mean([3.0, 4.0, 5.0])  # errors 0.58
    assert far.is_above(near)
    assert not near.is_above(far)
    assert not Effect.mean([2.0, 3.0, 4.0]).is_above(near)
    assert f"{near:.2f}" == "2.00 ± 0.58"


def test_ratios_are_medians_over_turns() -> None:
    assert turns.over([2.0, 3.0, 8.0], [1.0, 2.0, 2.0]) == 2.0


def test_the_step_size_with_the_lowest_loss_at_the_end_is_taken() -> None:
    problem = sparse.generate(0.5, n=8, d=3)

    def away(problem: Any, alpha: float) -> Any:
        """The best is to stay at zero; a larger step leads further away from it."""
        theta = np.zeros(3, np.float32)

        def go(count: int) -> None:
            theta[:] += count * alpha

        return Training("away", alpha, theta, go)

    problem.y[:] = np.asarray(problem.x.sum(1)).ravel() < 0
    curve = curves.tuned(away, problem, 2, (3.0, 1.0, 2.0))
    assert curve.alpha == 1.0
    assert len(curve.loss) == len(curve.error) == 3
    assert curve.loss == sorted(curve.loss)
