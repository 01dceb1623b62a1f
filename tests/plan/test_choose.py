"""The choice between methods in a run, in cells of rates and latencies."""

import itertools

import pytest

import offbeat
from offbeat.plan import Fabric, Parameter, Profile, Speeds, predict
from offbeat.plan.choose import BACK, CLOSE, Figures, first_fast
from offbeat.recipes.auto import CANDIDATES, EXACT

RATES, LATENCIES = (25e6, 100e6, 1e9, 100e9), (50e-6, 5e-3, 50e-3)
LAYERS = [Parameter(f"layer{i}", 2**18) for i in range(8)]
PROFILE = Profile.by_size(LAYERS, 0.05, 0.1, 0.005, Speeds.of_bandwidth(1e10))


@pytest.mark.parametrize("candidates", [CANDIDATES, EXACT])
def test_the_choice_is_that_of_the_plan(candidates: tuple[str, ...]) -> None:
    algorithms = [offbeat.algorithm(text) for text in candidates]
    chosen = {}
    for rate, latency in itertools.product(RATES, LATENCIES):
        fabric = Fabric(nodes=4, rate=rate, latency=latency)
        figures = Figures(PROFILE, fabric)
        index = first_fast([figures.seconds(each) for each in algorithms], now=0)
        planned = [predict(each, PROFILE, fabric, steps=24).seconds for each in algorithms]
        assert planned[index] <= 1.03 * CLOSE * min(planned)
        assert min(planned[:index], default=1e9) > 0.97 * CLOSE * min(planned)
        chosen[rate, latency] = index
    assert chosen[RATES[-1], LATENCIES[0]] == 0, "nothing is given up on a fast network"
    if candidates is CANDIDATES:
        assert chosen[RATES[0], LATENCIES[-1]] > 0


def test_a_choice_stays_between_two_limits() -> None:
    for first in (1.0, 1.04, 1.07, 1.09, 1.2):
        times = [first, 1.0]
        assert first_fast(times, now=0) == (0 if first <= CLOSE else 1)
        assert first_fast(times, now=1) == (0 if first <= BACK else 1)
