"""Accuracy over seeds: runs of virtual workers, whose course can be looked at, and their times."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.harness.case import Case, Outcome, Pause, Task
from bench.harness.rows import MNIST1D, in_rows, signals_case
from bench.harness.seeds import in_threads, over_seeds
from bench.harness.step_times import StepTime
from bench.sgp.task import digits_case, net

import offbeat


@pytest.fixture
def noise() -> Any:
    """The net of the SGP benches, which learns ten labels instead of digits."""
    labels = torch.arange(40) % 10
    part = torch.nn.functional.one_hot(labels, 196).float(), labels
    return Task("noise", net, lambda: (part, {"train": part, "heldout": part}), 16)


def case(task: Any, algorithm: offbeat.Algorithm, steps: int, **settings: Any) -> Any:
    return Case("test", task, algorithm, 2, steps, 0.1 * 2 * 16 / 256, **settings)


def test_the_learning_rate_warms_up_and_falls_three_times(noise: Any) -> None:
    full = 0.1 * 2 * 16 / 256
    expected = {0: full / 5, 4: full, 29: full, 30: full / 10, 60: full / 100, 80: full / 1000}
    for run in (case(noise, offbeat.sgp(), 90), digits_case("", offbeat.sgp(), 2, 90)):
        assert {epoch: run.lr(epoch) for epoch in expected} == pytest.approx(expected)


def test_virtual_workers_learn_and_are_looked_at_before_and_after_the_gossip(noise: Any) -> None:
    before: dict[int, dict[int, torch.Tensor]] = {}
    after: dict[int, dict[int, torch.Tensor]] = {}

    def look(seen: dict[int, dict[int, torch.Tensor]], replica: offbeat.Replica, step: int) -> None:
        weight = next(replica.model.parameters()).detach().clone()
        seen.setdefault(step, {})[replica.world.rank] = weight

    run = case(noise, offbeat.sgp("complete"), steps=60)
    outcome = in_threads(run, partial(look, before), partial(look, after))
    assert outcome.losses[-1] < outcome.losses[0]
    assert outcome.heldout > 50
    # A complete graph makes all equal in every exchange: only before it can they differ.
    assert all(not torch.equal(models[0], models[1]) for models in before.values())
    assert all(torch.equal(models[0], models[1]) for models in after.values())


def test_what_hooks_return_is_kept_until_one_ends_the_run(noise: Any) -> None:
    outcome = in_threads(
        case(noise, offbeat.sgp(), steps=9),
        before=lambda replica, step: replica.world.rank if step == 2 else None,
        after=lambda replica, step: step == 4,
    )
    assert outcome.seen == [False, False, 0, False, False, True]
    assert len(outcome.losses) == 5


def test_the_average_model_is_scored_on_all_workers(noise: Any) -> None:
    def score(model: torch.nn.Module, *part: torch.Tensor) -> float:
        scored.append(next(model.parameters()).detach().clone())
        return 1.0

    scored: list[torch.Tensor] = []
    run = case(replace(noise, score=score), offbeat.local_sgd(every=100), 3, consensus=True)
    assert in_threads(run).heldout == 1.0
    assert all(torch.equal(each, scored[0]) for each in scored)


def test_the_same_seed_gives_the_same_run_and_another_seed_does_not(noise: Any) -> None:
    first, again, other = (
        in_threads(case(noise, offbeat.sgp(overlap=1), 5, seed=s, pause=Pause(1e-4, uneven=True)))
        for s in (0, 0, 1)
    )
    assert first.losses == again.losses
    assert first.losses != other.losses


def test_runs_of_several_seeds_are_compared_seed_by_seed(noise: Any) -> None:
    run = case(noise, offbeat.sgp(), 5)
    ours = over_seeds(lambda run: Outcome({"heldout": 90.0 + run.seed}), run, 3)
    theirs = over_seeds(lambda run: Outcome({"heldout": 88.0 + run.seed}), run, 3)
    assert ours == {"heldout": [90.0, 91.0, 92.0]}
    assert str(ours) == "91.0 ± 1.0%"
    assert (ours.over(theirs).size, ours.over(theirs).error) == (2.0, 0.0)
    assert str(over_seeds(lambda _: Outcome({"heldout": 90.0}), run, 1)) == "90.0%"


def test_rows_learn_signals_as_often_as_they_pass_over_them() -> None:
    labels = torch.arange(40) % 10
    part = torch.nn.functional.one_hot(labels, 40).float(), labels
    case = signals_case("test", offbeat.sgp(), 4, passes=1.6)
    assert case.steps == 100
    task = replace(MNIST1D, data=lambda: (part, {"train": part, "heldout": part}))
    outcome = in_rows(replace(case, task=task))
    assert outcome.heldout == outcome.scores["train"] > 90
    assert in_rows(replace(case, task=task)) == outcome


def test_a_step_time_is_that_of_the_slowest_rank_after_the_warm_up() -> None:
    from offbeat.telemetry.recording import Recording, Step

    def recording(seconds: float, *spans: tuple[str, float, float]) -> Recording:
        first = Step(0.0, 9.0, {}, 9.0, spans=(("exchange:node", -9.0, 9.0),))
        return Recording(Path(), steps=[first, Step(0.0, seconds, {}, 0.1, spans=spans)])

    ranks = [
        (recording(1.0, ("exchange:node", -1.0, 0.5), ("exchange:local", 0.0, 0.2)), 10.0),
        (recording(2.0), 11.0),
    ]
    assert StepTime.of(ranks, warm_up=1) == StepTime(
        step=2.0, whole=11.0, stalled=0.1, in_flight=1.5
    )


def test_replicas_are_apart_at_the_end_of_a_run_without_a_cool_down(noise: Any) -> None:
    from bench.daso.accuracy import follow

    for cool_down in (0, 4):
        algorithm = offbeat.daso(every=8, total_steps=46, warmup_steps=4, cooldown_steps=cool_down)
        run = replace(case(noise, algorithm, 46), workers=4, per_node=2, rate=0.4)
        outcome, apart = follow(run)
        assert outcome.heldout > 50
        assert (apart > 0) == (cool_down == 0)
