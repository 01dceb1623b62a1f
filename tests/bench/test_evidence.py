"""The verdicts on the papers' claims follow from the results, and the page from the verdicts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench.__main__ import app
from bench.harness import GOAL, Bench, Claim, Effect, execute, files, page
from bench.harness.evidence import collect, due
from bench.harness.page import _listed
from typer.testing import CliRunner


@pytest.mark.parametrize(
    ("paper", "ours", "unit", "holds"),
    [
        (3.0, 1.67, "x", True),  # gains 0.67 of 2
        (3.0, 1.66, "x", False),
        (3.0, 1.0, "x", False),
        (1.9, 0.8, "x", False),
        (0.3, 0.1, "%", True),
        (0.3, 0.09, "%", False),
        (-0.4, -0.2, "%", True),
        (-0.4, 0.2, "%", False),
    ],
)
def test_a_third_of_the_papers_effect_is_needed(
    paper: float, ours: float, unit: str, holds: bool
) -> None:
    claim = Claim.effect("", Effect(paper, unit), Effect(ours, unit))
    assert claim.holds == holds


def test_an_effect_within_two_standard_errors_of_none_does_not_hold() -> None:
    clear, noise = (Effect.mean(sizes) for sizes in ([2.0, 3.0, 4.0], [-2.0, 3.0, 8.0]))
    assert (clear.size, noise.size) == (3.0, 3.0)
    assert clear.error == pytest.approx(1 / 3**0.5)
    assert [Claim.effect("", Effect(3.0), ours).holds for ours in (clear, noise)] == [True, False]
    assert str(clear) == "+3.0 ± 0.6 %"
    assert str(Effect(1.5, "x")) == "1.50 x"


@pytest.fixture
def evidence(monkeypatch: pytest.MonkeyPatch, results: Path) -> Callable[..., Any]:
    """Writes the result of a bench with two sources, and returns what is said about the first."""
    from bench.harness import evidence

    bench = Bench(name="sgp/some", claim="", minutes=2, evidence={"Table 1": "a", "Table 2": "b"})
    monkeypatch.setattr(evidence, "benches", lambda: [bench])

    def fetch(*claims: Claim, date: str = "2026-11-20T08:00:00+00:00") -> Any:
        file = files.result("sgp/some")
        file.write_text(json.dumps({"date": date, "claims": [vars(claim) for claim in claims]}))
        return evidence.collect()[0]

    return fetch


def test_the_verdict_counts_statements_that_this_hardware_can_show(
    evidence: Callable[..., Any],
) -> None:
    yes, no = (Claim("", "", "", holds, "Table 1") for holds in (True, False))
    other, goal = Claim("", "", "", False, "Table 2"), Claim("", "", "", False, GOAL)
    many = Claim("", "", "", False, "Table 1", needs="8 cores")
    cases = {
        (yes, yes, other, goal): "shown",
        (yes, no): "partly",
        (no, no): "not shown",
        (yes, many): "shown",
        (no, many): "not shown",
        (many,): "needs other hardware",
        (other,): "not yet measured",
    }
    assert {claims: evidence(*claims).verdict for claims in cases} == cases
    assert evidence(yes, no, many).row[-1] == "partly, 1 of 2"


def test_the_list_counts_statements_that_this_hardware_can_show(
    evidence: Callable[..., Any],
) -> None:
    yes, no, many = (Claim("", "", "", holds, needs=needs) for holds, needs in (
        (True, ""), (False, ""), (False, "8 cores")
    ))  # fmt: skip
    evidence(yes, no, many)
    bench = Bench(name="sgp/some", claim="what", minutes=2)
    assert _listed(bench) == "[some](sgp.md#some) 1/2"


def test_a_claim_without_source_is_about_the_only_one_of_its_bench(
    evidence: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from bench.harness import evidence as module

    plain = Claim("", "", "", True)
    assert evidence(plain).verdict == "not yet measured"
    single = Bench(name="sgp/some", claim="", minutes=2, evidence={"Table 1": "a"})
    monkeypatch.setattr(module, "benches", lambda: [single])
    assert evidence(plain).verdict == "shown"


def test_results_count_as_done_unless_they_are_older_than_asked(
    evidence: Callable[..., Any],
) -> None:
    evidence()
    assert [len(found) for found in (due(), due("2026-11-20"), due("2026-11-21"))] == [0, 0, 1]
    assert len(due(again=True)) == 1
    files.result("sgp/some").unlink()
    assert len(due()) == 1


def test_the_command_runs_what_is_due_and_shows_all_claims(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran = []

    def command(bench: Any, full: bool) -> list[str]:
        ran.append(bench.name)
        return ["true"]

    monkeypatch.setattr(execute.execute, "__defaults__", (False, command))
    monkeypatch.setattr(page, "rewrite", list)
    done = CliRunner().invoke(app, ["evidence", "--only-table"], env={"COLUMNS": "150"})
    assert done.exit_code == 0, done.output
    assert ran == []
    assert "SGP, Table 3" in done.output
    assert CliRunner().invoke(app, ["evidence", "--since", "9999"]).exit_code == 0
    assert {"sgp/graphs", "daso/accuracy", "lags/models"} <= set(ran)
    assert "sgp/speed" not in ran


def test_the_papers_make_23_claims() -> None:
    found = collect()
    assert len(found) == 23
    assert len({each.where for each in found}) == 23
