"""Algorithms as the text of their exchanges: read, printed and read again."""

import re
from dataclasses import replace

import pytest

import offbeat
from offbeat.compare.experiment import Method, split_algorithms
from offbeat.methods import Average, Cycle, PushSum, StaleAverage, TopK
from recipe_cases import CASES

PAIR = "TopK(density=0.01, over='local') + PushSum(topology=Ring(), over='node')"


def test_what_an_algorithm_prints_and_shows_makes_it_again() -> None:
    for case in CASES:
        assert offbeat.algorithm(repr(case.algorithm)) == case.algorithm
        shown = str(case.algorithm)
        assert offbeat.algorithm(shown) == case.algorithm
        assert shown.partition("(")[0] == case.text.partition("(")[0]
        assert len(shown) <= len(case.text) + len("(topology=)")


@pytest.mark.parametrize(
    ("algorithm", "shown"),
    [
        (offbeat.ddp(bucket_mb=25.0), "ddp()"),
        (offbeat.sgp("ring", overlap=1), "sgp(topology='ring', overlap=1)"),
        (offbeat.lags(len), "lags(density=len)"),
        (offbeat.alone(), "alone()"),
        (offbeat.Algorithm(), "Algorithm()"),
        (
            offbeat.Algorithm(TopK(density=0.01, over="local"), Average(over="node")),
            "TopK(density=0.01, over='local') + Average(over='node')",
        ),
        (replace(offbeat.ddp(), gradients=TopK()), "TopK()"),
    ],
    ids=str,
)
def test_an_algorithm_shows_what_is_no_default(algorithm: offbeat.Algorithm, shown: str) -> None:
    assert str(algorithm) == shown


def test_how_an_algorithm_is_written_does_not_distinguish_it() -> None:
    found = offbeat.sgp(offbeat.Ring())
    assert (str(found), found) == ("sgp(topology=Ring())", offbeat.sgp("ring"))
    assert hash(found) == hash(offbeat.sgp("ring"))


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
        ("TopK(density=0.1, density=0.5)", "TopK has an argument twice"),
        ("TopK(density={[]: 1})", "expected exchanges with literal arguments"),
        ("Algorithm(Mean(), Average(), end=5)", "end=5 without then="),
        ("TopK(density=7)", "density=7, expected a number in (0, 1]"),
        ("Average(every=__import__('os').getpid())", "expected exchanges with literal arguments"),
    ],
)
def test_other_texts_are_errors(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        offbeat.algorithm(text)


def test_a_schedule_goes_on_after_its_last_phase() -> None:
    ddp, sgp, alone = offbeat.ddp(), offbeat.sgp(), offbeat.alone()
    chained = ddp.until(5, sgp).until(9, alone)
    assert chained == ddp.until(5, sgp.until(9, alone))
    assert str(chained) == "ddp() until step 5, then sgp() until step 9, then alone()"
    with pytest.raises(ValueError, match="steps count from the start of the run"):
        ddp.until(5, sgp).until(4, alone)


def test_the_text_of_a_recipe_reads_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offbeat.methods.PushSum, "__str__", None)
    assert str(offbeat.sgp()) == "sgp()"
