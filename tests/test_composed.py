"""Algorithms as the text of their exchanges: read, printed and read again."""

import re

import pytest

import offbeat
from offbeat.compare.experiment import Method, split_algorithms
from offbeat.gradients import TopK
from offbeat.parameters import Cycle, PushSum, StaleAverage
from recipe_cases import Case, every_recipe

PAIR = "TopK(density=0.01, over='local') + PushSum(topology=Ring(), over='node')"


@every_recipe
def test_what_an_algorithm_prints_makes_it_again(case: Case) -> None:
    assert offbeat.algorithm(repr(case.algorithm)) == case.algorithm


def test_a_pair_is_read_in_any_order() -> None:
    pair = offbeat.Algorithm(
        gradients=TopK(density=0.01, over="local"),
        parameters=PushSum(topology=offbeat.Ring(), over="node"),
    )
    assert offbeat.algorithm(PAIR) == pair
    assert offbeat.algorithm(" + ".join(reversed(PAIR.split(" + ")))) == pair
    assert offbeat.algorithm(str(pair)) == pair


def test_settings_are_calls_too() -> None:
    found = offbeat.algorithm("StaleAverage(cycle=Cycle(every=8), wire=None)")
    assert found.parameters == StaleAverage(cycle=Cycle(every=8), wire=None)


def test_comparisons_run_pairs() -> None:
    texts = split_algorithms(f"ddp,{PAIR},lags")
    assert texts == ["ddp", PAIR, "lags"]
    assert Method.parse(PAIR).algorithm == offbeat.algorithm(PAIR)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("TopK + Foo()", "unknown name 'Foo'"),
        ("TopK + sgp()", "unknown name 'sgp'"),
        ("PushSum + Average", "is a second exchange of parameters"),
        ("Ring()", "Ring() is no exchange"),
        ("TopK(density=lambda: 1)", "expected exchanges with literal arguments"),
        ("TopK(density=0.1) +", "expected exchanges with literal arguments"),
        ("PushSum(speed=1)", "unexpected keyword argument 'speed'"),
        ("TopK(density=7)", "density=7, expected a number in (0, 1]"),
        ("Average(every=__import__('os').getpid())", "expected exchanges with literal arguments"),
    ],
)
def test_other_texts_are_errors(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        offbeat.algorithm(text)
