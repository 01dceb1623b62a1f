"""The benches are listed, run what they declare, and their results are those of the pages."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from bench.__main__ import app
from bench.harness import Bench, Claim, Result, execute, files, page
from bench.harness.catalogue import benches, declared, select
from bench.harness.report import report
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
METHODS = (
    "choose", "outer", "sgp", "adasum", "daso", "async_adam", "lags", "ddp", "elastic", "scale",
    "plan", "internet", "gpu",
)  # fmt: skip
BENCHES = sorted(
    f"{path.parent.name}/{path.stem}"
    for method in METHODS
    for path in (ROOT / "bench" / method).glob("*.py")
    if "\nBENCH = Bench(" in path.read_text("utf-8")
)
# No machine with a GPU was at hand: their blocks of the page say that nothing was measured.
UNMEASURED = {"gpu/kernels", "gpu/steps"}
MEASURED = [n for n in BENCHES if n not in UNMEASURED or (RESULTS / f"{n}.json").exists()]
FILES = sorted((ROOT / "bench").glob("*/*.py"))


def test_a_report_holds_every_row_and_verdict(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    false = Claim("faster", "2 x", "0.9 x", holds=False)
    bench = Bench(name="sgp/some", claim="", minutes=1)
    steps = {4: [3.0, 1.0, 2.0, 2.0]}
    rows = [("SGP", "97.0%")]
    report(bench, Result("Table", ("method", "ours"), rows, [false], measured=steps))
    written = json.loads((results / "sgp" / "some.json").read_text("utf-8"))
    assert written["rows"] == [["SGP", "97.0%"]]
    said = {"text": "faster", "paper": "2 x", "ours": "0.9 x", "holds": False}
    assert said.items() <= written["claims"][0].items()
    assert written["measured"] == {"4": {"median": 2.0, "min": 1.0, "max": 3.0, "n": 4}}
    raw = json.loads((results / "raw" / "sgp" / "some.json").read_text("utf-8"))
    assert raw["measured"] == {"4": [3.0, 1.0, 2.0, 2.0]}
    said = capsys.readouterr().out
    assert "97.0%" in said
    assert "NO" in said


def test_benches_stay_short() -> None:
    lines = {path: path.read_text("utf-8").count("\n") for path in FILES}
    assert [path for path, count in lines.items() if count > 200] == []


def test_every_bench_is_listed_with_its_minutes() -> None:
    assert sorted(bench.name for bench in benches()) == BENCHES
    for bench in benches():
        assert bench.claim
        assert 0 < bench.minutes <= 10
        assert bench.full_minutes is None or bench.full_minutes > bench.minutes
    table = CliRunner().invoke(app, [], env={"COLUMNS": "120"})
    assert all(f"{name} " in table.output for name in BENCHES)


def test_a_docstring_says_what_is_tested_and_what_a_table_shows(tmp_path: Path) -> None:
    path = tmp_path / "some.py"
    bench = 'BENCH = Bench(name="sgp/some", minutes=1, evidence="Table 1")'
    path.write_text(f'"""As accurate.\n\nOn digits.\n"""\n\n{bench}\n', encoding="utf-8")
    found = declared(path)
    assert found is not None
    assert (found.claim, found.evidence) == ("As accurate", {"Table 1": "As accurate"})


@pytest.mark.parametrize("name", BENCHES)
def test_a_bench_declares_its_own_name_and_options(name: str) -> None:
    pytest.importorskip("pytorch_optimizer", reason="LAMB comes from the bench extra")
    module = importlib.import_module(f"bench.{name.replace('/', '.')}")
    assert module.BENCH.name == name
    done = CliRunner().invoke(app, ["one", name, "--help"])
    assert done.exit_code == 0, done.output
    assert f"python -m bench one {name}" in done.output
    assert ("--full" in done.output.split("Examples")[0]) == (module.BENCH.full_minutes is not None)


def test_benches_are_chosen_by_name_folder_or_module() -> None:
    assert [bench.name for bench in select(["sgp/speed", "daso.speed"])] == [
        "sgp/speed", "daso/speed"
    ]  # fmt: skip
    assert {bench.name for bench in select(["lags/"])} == {n for n in BENCHES if n[:4] == "lags"}
    with pytest.raises(ValueError, match="did you mean sgp/speed"):
        select(["spg/speed"])


def test_a_bench_that_fails_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def command(bench: Any, full: bool) -> list[str]:
        ran.append((bench.name, full))
        return [sys.executable, "-c", f"exit({bench.name == 'ddp/overhead'})"]

    monkeypatch.setattr(execute.execute, "__defaults__", (False, command))
    monkeypatch.setattr(page, "rewrite", list)
    failing = CliRunner().invoke(app, ["run", "ddp/overhead", "lags/speed", "--full"])
    assert ran == [("lags/speed", True), ("ddp/overhead", True)]
    assert failing.exit_code == 1
    assert "failed: ddp/overhead" in failing.output
    assert CliRunner().invoke(app, ["run", "lags/speed"]).exit_code == 0
    assert CliRunner().invoke(app, ["run"]).exit_code == 2


def test_the_tables_of_the_pages_are_those_of_the_committed_results(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    committed = [path.read_text("utf-8") for path in files.PAGES]
    copies = tuple(tmp_path / str(number) for number, _ in enumerate(committed))
    for copy, text in zip(copies, committed, strict=True):
        copy.write_text(text, encoding="utf-8")
    monkeypatch.setattr(files, "PAGES", copies)
    assert page.rewrite() == []
    *emptied, _ = copies  # each rewrite makes the tables of all pages
    for copy in emptied:
        text = page.BLOCK.sub(r"\g<begin><!-- end -->", copy.read_text("utf-8"))
        copy.write_text(text, encoding="utf-8")
    assert page.rewrite() == emptied
    assert [copy.read_text("utf-8") for copy in copies] == committed
    blocks = [block for text in committed for block in page.BLOCK.finditer(text)]
    assert {b["name"] for b in blocks} == {*BENCHES, "all"}


def test_a_claim_that_needs_other_hardware_is_no_failure() -> None:
    verdicts = [Claim("", "", "", holds, needs="8 cores").row[-1] for holds in (False, True)]
    assert verdicts == ["needs 8 cores"] * 2
    assert [Claim("", "", "", holds).row[-1] for holds in (False, True)] == ["NO", "yes"]


def test_committed_results_have_their_verdicts() -> None:
    for name in MEASURED:
        claims = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))["claims"]
        lines = (RESULTS / f"{name}.md").read_text("utf-8").splitlines()[2:]
        verdicts = [Claim(**each).row for each in claims]
        assert claims, name
        assert lines == [f"| {' | '.join(verdict)} |" for verdict in verdicts], name


def test_results_are_those_of_benches_and_hold_no_recordings() -> None:
    paths = [path for path in RESULTS.rglob("*") if path.is_file()]
    assert {str(path.relative_to(RESULTS).with_suffix("")) for path in paths} == set(MEASURED)
    texts = [path.read_text("utf-8") for path in paths if path.suffix == ".json"]
    # The longest are medians, those of 63 cases of 7 methods in adasum/latency, and idle shares.
    assert max(text.count("\n") for text in texts) < 1200
