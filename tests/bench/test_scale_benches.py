"""Benches of scale: predictions from graphs, beside noise that is mixed step by step."""

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from bench.scale.agreement import adasum_step
from bench.scale.churn import longest
from bench.scale.growth import predicted
from bench.scale.laws import LAWS
from bench.scale.spread import amplification, gap
from bench.scale.worker import stalls, timed_step

import offbeat
from offbeat.topology import Topology
from offbeat.topology.graph import mixing_matrix


@pytest.mark.parametrize(
    "topology",
    [offbeat.Ring(), offbeat.Exponential(), offbeat.BipartiteExponential(), offbeat.Complete()],
    ids=str,
)
def test_the_prediction_is_what_noise_comes_to(topology: Topology) -> None:
    size, steps, shrink = 8, 12, 0.9
    noise = np.random.default_rng(0).normal(size=(steps, size, 40_000))
    x = np.zeros((size, 40_000))
    for step in range(steps):
        x = mixing_matrix(topology, size, step) @ (shrink * x + noise[step])
    found = np.sqrt(((x - x.mean(0)) ** 2).mean())
    assert found == pytest.approx(amplification(topology, size, steps, shrink), rel=0.01, abs=1e-9)


def test_gaps() -> None:
    assert gap(offbeat.Complete(), 8) == pytest.approx(1)
    assert gap(offbeat.Exponential(), 8) == pytest.approx(1, abs=1e-4)  # three exchanges: the mean
    assert gap(offbeat.Ring(), 8) == pytest.approx(1 - (1 + 2 * np.cos(np.pi / 4)) / 3)


def test_the_step_of_adasum_lies_between_the_mean_and_the_sum() -> None:
    for ratio in adasum_step(4, steps=8):
        assert 1 < ratio < 4


@pytest.mark.parametrize("ranks", [8, 128])
def test_the_laws_of_growth_say_what_plan_predicts(ranks: int) -> None:
    for method, law in LAWS.items():
        if method == "ad_psgd" or (method == "adasum" and ranks > 8):
            continue  # a bound; seconds
        _, sent = predicted(method, ranks)
        # In large worlds the slices of this small model are rounded up to whole blocks.
        tolerance = 0.25 if "int8" in method else 0.05
        assert sent == pytest.approx(law.bytes(ranks), rel=tolerance), method


def test_a_stall_is_the_longest_call_around_an_admission(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = 0.0, [(1, 0)] * 8 + [(5, 0)] + [(1, 0)] * 20 + [(9, 1)] + [(1, 0)] * 8

    def step() -> None:
        nonlocal now
        took, lost = calls[replica.steps - 10]
        now += took
        replica.lost += [{}] * lost
        replica.steps += 1

    replica: Any = SimpleNamespace(steps=10, lost=[], step=step)
    seconds: dict[int, float] = {}
    lost_in: set[int] = set()
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    for _ in calls:
        timed_step(replica, seconds, lost_in)
    # 3: before it came; 36: beside a loss
    assert stalls(seconds, lost_in, [3, 17, 25, 36]) == {17: 5, 25: 1}
    assert longest([[(17, 5.0), (25, 1.0)], [(25, 2.0)]]) == [5.0, 2.0]
