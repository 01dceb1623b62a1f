"""What steps are worth is what the committed run of the bench has measured."""

import json
from pathlib import Path

import pytest

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
