"""The bench behind the guide: steps until a loss, the same tuning for all, and what is recorded."""

import math
from typing import Any

import pytest
from bench.choose import runs
from bench.choose.runs import needed
from bench.choose.tasks import LOOK, MOST, TASKS, Course

pytestmark = pytest.mark.usefixtures("results")


def test_steps_are_counted_between_two_looks() -> None:
    assert needed([3.0, 2.0, 1.0], 1.5) == 25
    assert needed([3.0, 2.0, 2.5], 2.2) == 18  # the first time
    assert needed([3.0, 2.0], 3.5) == 10
    assert math.isinf(needed([3.0, 2.0], 1.0))


def test_rates_are_tuned_beyond_the_grid_once_and_runs_are_made_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[str, float, int]] = []

    def follow(task: Any, recipe: str, rate: float, seed: int, target: float) -> Course:
        # The best rate is 0.01 for ddp, which ends at 1.0, and far above the grid for all others.
        made.append((recipe, rate, seed))
        gap = abs(math.log(rate / (0.01 if recipe == runs.DDP else 1.0)))
        return Course([2.0 + gap, 1.0 + gap / (1 if recipe == runs.DDP else 100)])

    monkeypatch.setattr(runs, "follow", follow)
    monkeypatch.setattr(runs, "step_alone", lambda task: [1e-3, 2e-3, 1e-4])
    tuned = runs.Runs.read(3).of(TASKS[0])
    assert tuned.rates[runs.DDP] == 9e-3
    assert tuned.rates["diloco(every=24)"] == pytest.approx(27e-3)
    tried = sorted({rate for recipe, rate, _ in made if recipe == "diloco(every=8)"})
    assert tried == pytest.approx([1e-3, 3e-3, 9e-3, 27e-3])
    assert tuned.worth(runs.DDP).size == 1.0
    count = len(made)
    again = runs.Runs.read(3).of(TASKS[0])
    assert again.rates == tuned.rates
    assert len(made) == count


def test_more_workers_are_rows_with_runs_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def follow(
        task: Any, recipe: str, rate: float, seed: int, target: float, of: int, most: int
    ) -> Course:
        made.append(of)
        return Course([2.0, 1.0 if recipe == runs.DDP else 0.5])

    monkeypatch.setattr(runs, "follow_rows", follow)
    kept = runs.Runs({}, {TASKS[0].name: [1e-3, 2e-3, 1e-4]}, 1, "choose/workers")
    methods = {"ddp": (runs.DDP,), "sgp": ("sgp()",)}
    few, many = (runs.Tuned(kept, TASKS[0], workers, methods) for workers in (8, 32))
    assert few.worth("sgp()").size == pytest.approx(20 / (10 + 10 / 1.5))
    assert many.worth("sgp()").size == few.worth("sgp()").size
    assert made.count(8) == made.count(32) > 0
    most = runs.Tuned(kept, TASKS[0], 128, methods, like=many)
    assert most.worth("sgp()").size == many.worth("sgp()").size
    assert made.count(128) == len(methods), "it takes the rates of fewer workers"
    assert many.seconds[runs.DDP, "25 Mbit/s"] > few.seconds[runs.DDP, "25 Mbit/s"]


def test_only_a_run_at_the_best_rate_may_take_more_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that has reached its target, though not with its last look, is not made again."""
    made: list[tuple[str, int]] = []

    def follow(
        task: Any, recipe: str, rate: float, seed: int, target: float, of: int, most: int
    ) -> Course:
        made.append((recipe, most))
        if recipe == runs.DDP:
            return Course([2.0, 1.0])
        if recipe == "daso()":
            return Course([2.0, 0.5, 1.5])
        return Course([2.0] * (most // LOOK - 1) + [0.5 if most == 800 else 1.9])

    monkeypatch.setattr(runs, "follow_rows", follow)
    kept = runs.Runs({}, {TASKS[0].name: [1e-3, 2e-3, 1e-4]}, 1, "choose/workers")
    methods = {"ddp": (runs.DDP,), "daso": ("daso()",), "sgp": ("sgp()",)}
    tuned = runs.Tuned(kept, TASKS[0], 8, methods, most=800)
    for _ in range(2):
        assert tuned.worth("daso()").size == pytest.approx(20 / (10 + 10 / 1.5))
        assert 20 / 800 < tuned.worth("sgp()").size < 20 / 780
    assert {most for recipe, most in made if recipe != "sgp()"} == {MOST}
    assert made.count(("sgp()", 800)) == 1
