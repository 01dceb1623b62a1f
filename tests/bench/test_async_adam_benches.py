"""The benches of asynchronous Adam: baselines that converge, times that are read off correctly."""

import importlib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (ROOT, ROOT / "examples"):
        monkeypatch.syspath_prepend(str(folder))


@pytest.fixture
def sparse(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The problem and the baselines, interpreted: compiling takes longer than they do."""
    from bench.async_adam import sparse_problem

    interpreted = getattr(sparse_problem.sgd_pass, "py_func", None)
    monkeypatch.setattr(sparse_problem, "sgd_pass", interpreted)
    return sparse_problem


@pytest.fixture
def curves() -> ModuleType:
    return importlib.import_module("bench.async_adam.curves")


def test_a_loss_is_reached_between_two_looks(curves: ModuleType) -> None:
    curve = curves.Curve("some", 0.1, [1.0, 0.5, 0.25], [0.5, 0.4, 0.3], pace=2.0)
    reached = [curve.passes_to(loss) for loss in (0.5, 0.375, 0.25, 0.2)]
    assert reached == pytest.approx([1.0, 1.5, 2.0, float("inf")])
    assert curve.seconds_to(0.375) == pytest.approx(3.0)
    assert curve.seconds == [0.0, 2.0, 4.0]


def test_methods_are_compared_within_a_turn(
    curves: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine is twice and three times as slow in some turns, and at a time only for one."""
    clock, slower = [0.0], iter([1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 3.0, 1.0, 1.0, 1.0])

    def method(takes: float) -> Any:
        def go(count: int) -> None:
            clock[0] += count * takes * next(slower)

        return lambda problem, alpha: SimpleNamespace(go=go)

    monkeypatch.setattr(curves, "TURNS", 5)
    monkeypatch.setattr(curves, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    plain = curves.Curve("some", 0.1, [], [])
    one, two = curves.timed([plain, plain], [method(0.5), method(2.0)], None)
    assert (one.pace, two.pace) == (0.5, 2.0)


def test_ratios_are_medians_over_turns() -> None:
    speed = importlib.import_module("bench.async_adam.speed")
    assert speed.ratio([2.0, 3.0, 8.0], [1.0, 2.0, 2.0]) == 2.0


def test_the_step_size_with_the_lowest_loss_at_the_end_is_taken(
    sparse: ModuleType, curves: ModuleType
) -> None:
    problem = sparse.generate(0.5, n=8, d=3)

    def away(problem: Any, alpha: float) -> Any:
        """The best is to stay at zero; a larger step leads further away from it."""
        theta = np.zeros(3, np.float32)

        def go(count: int) -> None:
            theta[:] += count * alpha

        return sparse.Training("away", alpha, theta, go)

    problem.y[:] = np.asarray(problem.x.sum(1)).ravel() < 0
    curve = curves.tuned(away, problem, 2, (3.0, 1.0, 2.0))
    assert curve.alpha == 1.0
    assert len(curve.loss) == len(curve.error) == 3
    assert curve.loss == sorted(curve.loss)


@pytest.mark.parametrize(("svrg", "near"), [(False, 1.05), (True, 1.001)])
def test_the_baselines_find_the_optimum(
    sparse: ModuleType, curves: ModuleType, svrg: bool, near: float
) -> None:
    problem = sparse.generate(0.3, n=64, d=10)
    best = LogisticRegression(C=1 / (sparse.L2 * 64), fit_intercept=False, tol=1e-8)
    optimum = problem.loss(best.fit(problem.x, problem.y).coef_[0])
    curve = curves.record(sparse.baseline(svrg=svrg)(problem, 0.5), problem, 100)
    assert curve.loss[-1] < near * optimum  # SGD: noise of small batches at a constant step
    assert curve.loss[0] == pytest.approx(np.log(2))
