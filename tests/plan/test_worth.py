"""What steps are worth is what the committed run of the bench has measured."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from offbeat.plan.predict import Parts, Prediction
from offbeat.plan.recommend import reason
from offbeat.plan.result import Row
from offbeat.plan.worth import MEASURED, worth

RESULT = Path(__file__).parents[2] / "bench" / "results" / "choose" / "sooner.json"


def test_factors_are_those_of_the_committed_run() -> None:
    found = json.loads(RESULT.read_text("utf-8"))
    rows = [dict(zip(found["headings"], row, strict=True)) for row in found["rows"]]
    measured = {
        row["recipe at 100 Mbit/s"]: float(row["steps are worth"].split()[0])
        for row in rows
        if row["task"] == "GPT" and row["steps are worth"]
    }
    assert measured == MEASURED


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ddp", "1.00"),
        ("sgp(overlap=1, wire='bf16')", "0.88 (overlap=2, wire='bf16')"),
        ("diloco(every=100)", "0.56 (every=24)"),
        ("diloco(fragments=4)", "0.68 (every=24, fragments=2, delay=6, wire='int8')"),
        ("alone", "None"),
        ("noloco", "None"),
    ],
)
def test_a_recipe_shows_the_settings_that_were_measured(text: str, said: str) -> None:
    assert str(worth(text)) == said


@pytest.mark.parametrize(
    ("chosen", "faster", "said"),
    [
        # Faster than the baseline, but its steps are worth less than those of sgp: 2.9 x 0.56.
        ("diloco", 2.9, "sgp(overlap=1) reaches a loss first: 2.40× the steps"),
        ("noloco", 2.9, ""),  # what its steps are worth is not known
        ("sgp(overlap=2)", 2.45, ""),  # alike
    ],
)
def test_the_reason_names_what_is_best_by_the_worth_of_steps(
    chosen: str, faster: float, said: str
) -> None:
    def row(name: str, faster: float) -> Row:
        parts = Parts(compute=0.1, passes=0.0, latency=0.0, bandwidth=0.3, stragglers=0.0)
        made = Prediction(1 / faster, 1.0, parts, 0.0, 0.0, 0.0, {})
        return Row(name, 4, faster, made, worth(name))

    rows = [row("ddp", 1.0), row("sgp(overlap=1)", 2.4), row(chosen, faster)]
    setup = SimpleNamespace(rate=1e9)
    _, _, found = reason(rows[-1], rows, "ddp", setup).partition(" By what steps are worth, ")  # type: ignore[arg-type]
    assert found.startswith(said)
    assert bool(found) == bool(said)
