"""Benches of scale: predictions from graphs, beside noise that is mixed step by step."""

import numpy as np
import pytest

import offbeat
from offbeat.topology import Topology
from offbeat.topology.graph import mixing_matrix


@pytest.mark.parametrize(
    "topology",
    [offbeat.Ring(), offbeat.Exponential(), offbeat.BipartiteExponential(), offbeat.Complete()],
    ids=str,
)
def test_the_prediction_is_what_noise_comes_to(topology: Topology) -> None:
    from bench.scale.spread import amplification

    size, steps, shrink = 8, 12, 0.9
    noise = np.random.default_rng(0).normal(size=(steps, size, 40_000))
    x = np.zeros((size, 40_000))
    for step in range(steps):
        x = mixing_matrix(topology, size, step) @ (shrink * x + noise[step])
    found = np.sqrt(((x - x.mean(0)) ** 2).mean())
    assert found == pytest.approx(amplification(topology, size, steps, shrink), rel=0.01, abs=1e-9)


def test_gaps() -> None:
    from bench.scale.spread import gap

    assert gap(offbeat.Complete(), 8) == pytest.approx(1)
    assert gap(offbeat.Exponential(), 8) == pytest.approx(1, abs=1e-4)  # three exchanges: the mean
    assert gap(offbeat.Ring(), 8) == pytest.approx(1 - (1 + 2 * np.cos(np.pi / 4)) / 3)


def test_the_step_of_adasum_lies_between_the_mean_and_the_sum() -> None:
    from bench.scale.agreement import adasum_step

    for ratio in adasum_step(4, steps=8):
        assert 1 < ratio < 4
