"""The engines of the benches: turns that alternate, budgets of turns, growth, and commands."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench.harness import Bench, Result, command, turns
from bench.harness.gpt import gpt
from bench.harness.growth import exponent
from bench.harness.training import Times, Training
from typer.testing import CliRunner


def test_ways_take_turns_in_an_order_that_alternates(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, ran = [0.0], []

    def way(name: str, seconds: float) -> turns.Work:
        def work() -> None:
            ran.append(name)
            clock[0] += seconds * len(ran)  # the machine becomes slower

        return work

    monkeypatch.setattr(turns, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    found = turns.in_turns({"a": way("a", 1), "b": way("b", 2)}, rounds=2, warm_up=1)
    assert ran == ["a", "b", "b", "a", "a", "b"]
    assert found == {"a": [4, 5], "b": [6, 12]}
    assert turns.over(found["b"], found["a"]) == pytest.approx((6 / 4 + 12 / 5) / 2)


@pytest.mark.parametrize(
    ("limits", "turns"), [({"rounds": 3}, 3), ({"seconds": 25.0}, 2), ({"seconds": 0.0}, 1)]
)
def test_turns_end_after_their_number_or_their_seconds(limits: Any, turns: int) -> None:
    training, found = Training(gpt, ("ddp",), steps=2, **limits), Times()
    while found.is_due(training):
        found.steps.append(2)
        found.seconds.append(10.0)
    assert len(found.steps) == 1 + turns  # the lead takes its seconds too


def test_the_exponent_of_growth() -> None:
    assert exponent([2, 4, 16], [3 * n**1.5 for n in (2, 4, 16)]) == pytest.approx(1.5)


def test_full_stands_for_the_values_of_other_options(results: Path) -> None:
    """The help is that of the module where the function has none."""

    @command(Bench(name="sgp/some", minutes=1), full={"nodes": 16})
    def app(nodes: int = 4, rounds: int = 2) -> Result:
        return Result("title", ("a",), [(f"{nodes} {rounds}",)], [])

    done = CliRunner().invoke(app, ["--help"])
    assert all(text in done.output for text in ("The engines of", "The same as --nodes 16."))
    assert "16 2" in CliRunner().invoke(app, ["--full"]).output
    assert "4 2" in CliRunner().invoke(app, []).output


def test_parameters_of_a_measurement_are_the_options_of_its_command(results: Path) -> None:
    bench = Bench(name="sgp/some", claim="", minutes=1)

    @command(bench, "--nodes 2", full="Twice the steps.", ranks="Sizes.")
    def app(full: bool = False, nodes: int = 4, ranks: list[int] | None = None) -> Result:
        """Measure something."""
        return Result("title", ("a",), [(f"{nodes} {ranks} {full}",)], [])

    done = CliRunner().invoke(app, ["--help"])
    assert all(text in done.output for text in ("Measure something", "Twice", "Emulated nodes"))
    done = CliRunner().invoke(app, ["--nodes", "8", "--full", "--ranks", "1", "--ranks", "2"])
    assert "8 [1, 2] True" in done.output
    assert (results / "sgp/some.json").exists()
