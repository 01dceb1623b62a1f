"""Random histories of losses, joins, leaves and resumes: each sample once, or counted."""

import random
from collections import Counter
from typing import Any

import pytest

from sampled_runs import Run

HISTORIES, EPOCHS = 30, 3
LENGTHS = (20, 61, 200, 501)  # of these, drop_last needs more than a step of 5 ranks


def trained(draw: random.Random, window: int, drop_last: bool) -> tuple[Run, dict[str, int]]:
    run = Run(draw, draw.choice(LENGTHS[drop_last:]), drop_last, window)
    run.train(EPOCHS)
    stats = [worker.sampler.stats() for worker in run.workers.values()]
    assert all(each == stats[0] for each in stats)
    return run, stats[0]


@pytest.mark.parametrize("window", [1, 5], ids=["each step", "every 5 steps"])
def test_each_sample_counts_once_an_epoch(window: int, draws: random.Random) -> None:
    """An exchange is each step, or what a rank did in up to 5 steps is lost with it."""
    seen = Counter[str]()
    for _ in range(HISTORIES):
        run, stats = trained(draws, window, drop_last=False)
        assert set(run.count) == set(range(run.length))
        assert min(run.count.values()) == EPOCHS, "no sample is left out"
        extra = sum(run.count.values()) - EPOCHS * run.length
        assert extra <= stats["repeated"], "what counts twice is counted"
        assert stats["left"] == 0
        seen.update(run.events)
    for event in (
        "lost", "left", "joined", "joined again", "resumed", "restart", "heard a step later",
        "rest", "balanced", "rested",
    ):  # fmt: skip
        assert seen[event] > 0, event


@pytest.mark.parametrize("window", [1, 5], ids=["each step", "every 5 steps"])
def test_drop_last_leaves_out_less_than_a_step(window: int, draws: random.Random) -> None:
    for _ in range(HISTORIES // 2):
        run, stats = trained(draws, window, drop_last=True)
        assert sum(run.count.values()) <= EPOCHS * run.length + stats["repeated"]
        missing = EPOCHS * run.length - sum(run.count.values())
        assert missing <= run.largest * (EPOCHS + run.events["resumed"] + run.events["rest"])


def test_the_same_history_gives_the_same_samples() -> None:
    def histories() -> list[Any]:
        runs = [trained(random.Random(seed), 1, False)[0] for seed in range(5)]
        return [[worker.trained for worker in run.workers.values()] for run in runs]

    assert histories() == histories()
