"""``offbeat plan``: tables, JSON, the report, and errors before any work."""

import json
import re
import time
from pathlib import Path
from statistics import median

import pytest
from clusters import fabric, profile, seconds
from test_profile import BY_HAND, SCRIPT, write
from typer.testing import CliRunner, Result

import offbeat
from offbeat.cli import app
from offbeat.plan import Fabric, Parameter, Profile, Speeds, Stragglers, predict
from offbeat.plan.choose import CLOSE
from offbeat.plan.recommend import choose
from offbeat.plan.result import Row
from offbeat.planner.arguments import DEFAULT
from offbeat.planner.report import table
from offbeat.recipes import RECIPES

FEW = "ddp,sgp(overlap=1),local_sgd(every=4),alone"


def plan(*words: str) -> Result:
    return CliRunner().invoke(app, ["plan", *words])


def test_the_tables_show_every_method_and_one_sentence(tmp_path: Path) -> None:
    done = plan("--profile", str(write(tmp_path)), "--nodes", "4,8", "--algorithms", FEW)
    assert done.exit_code == 0, done.output
    for text in ("ddp", "sgp(overlap=1)", "local_sgd(every=4)", "alone", "4 nodes", "8 nodes"):
        assert text in done.output
    for heading, *_ in table.COLUMNS:
        assert heading in done.output
    assert len(re.findall(r"On 8 nodes at 1 Gbit/s, use [^.]*\.", done.output)) == 1
    assert "not convergence" in done.output


def test_json_holds_what_was_predicted(tmp_path: Path) -> None:
    words = ["--nodes", "4,8", "--rate", "100mbit", "--latency", "1ms", "--algorithms", FEW]
    done = plan("--profile", str(write(tmp_path)), *words, "--at", "4", "--json")
    found = json.loads(done.output)
    assert [(row["name"], row["nodes"]) for row in found["rows"]] == [
        (name, nodes) for nodes in (4, 8) for name in FEW.split(",")
    ]
    assert found["setup"]["rate"] == 1e8
    assert found["setup"]["latency"] == 1e-3
    assert found["at"] == 4
    ddp = found["rows"][0]
    assert ddp["faster"] == 1
    assert ddp["prediction"]["seconds"] > BY_HAND["forward"] + BY_HAND["backward"]
    alone = found["rows"][3]["prediction"]
    assert alone["seconds"] == pytest.approx(0.31)
    assert alone["bytes_per_node"] == 0


@pytest.mark.parametrize("each", [1, 2])
def test_every_recipe_is_planned_unless_the_methods_are_given(tmp_path: Path, each: int) -> None:
    words = ("--nodes", "4", "--ranks-per-node", str(each), "--json")
    done = plan("--profile", str(write(tmp_path)), *words)
    names = {row["name"].partition("(")[0] for row in json.loads(done.output)["rows"]}
    # slgs is the baseline of lags, and torch_ddp takes the time of ddp.
    assert names == {recipe.__name__ for recipe in RECIPES} - {"slgs", "torch_ddp"}
    assert DEFAULT.startswith("ddp,")
    texts = [row["name"] for row in json.loads(done.output)["rows"]]
    assert sum("within='local'" in text for text in texts) == (10 if each > 1 else 0)


def test_a_script_is_profiled_once_and_its_profile_kept(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    kept = tmp_path / "kept.json"
    words = (str(tmp_path / "train.py"), "--profile", str(kept), "--nodes", "4", "--steps", "7")
    first = plan(*words, "--algorithms", "ddp", "--json")
    assert first.exit_code == 0, first.output
    written = kept.read_text()
    (tmp_path / "train.py").write_text("raise SystemExit(3)")
    again = plan(*words, "--algorithms", "ddp", "--json")
    assert again.exit_code == 0, again.output
    assert kept.read_text() == written
    assert json.loads(again.stdout)["setup"]["jitter"] == "measured"
    assert again.stderr == f"profile: read from {kept}, the script was not run\n"
    kept.unlink()
    failed = plan(*words)
    assert failed.exit_code == 1
    assert "the script failed" in failed.output
    assert not kept.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--rate", "1gb"), "rate: got '1gb', expected a number with kbit, mbit or gbit"),
        (("--inside", "fast"), "inside: got 'fast'"),
        (("--rate", "9" * 400 + "gbit"), "mbit or gbit, from 1kbit to 1000000gbit; for example"),
        (("--latency", "5"), "latency: got '5', expected a number with ns, us, ms or s"),
        (("--nodes", "4,2"), "nodes: got '4,2', expected ascending whole numbers"),
        (("--nodes", "4.5"), "nodes: got '4.5'"),
        (("--nodes", "0"), "nodes: got '0'"),
        (
            ("--nodes", "99999999999999"),
            "nodes=99999999999999, ranks_per_node=1, expected at most 131,072 ranks in all",
        ),
        (
            ("--ranks-per-node", "0"),
            "ranks_per_node=0, expected a whole number of ranks, 1 or more",
        ),
        (("--jitter", "5"), "jitter: got '5', expected 'measured' or a percentage"),
        (("--jitter", "measured"), 'the profile has no "spread"'),
        (("--late", "1%"), "late: got '1%', expected a percentage and a factor"),
        (("--late", "1%:0.5x"), "late: got '1%:0.5x'"),
        (("--straggler", "2"), "straggler: got '2', expected the fraction of the time"),
        (("--balanced",), "balanced: without a slow rank; add --straggler"),
        (("--device-factor", "0"), "device factor: got 0, expected a number from 1e-06"),
        (("--device-factor", "nan"), "device factor: got nan, expected a number from 1e-06"),
        (("--device-factor", "inf"), "device factor: got inf, expected a number from 1e-06"),
        (("--algorithms", "alone"), "algorithms: got 'alone', which exchanges nothing; add one to"),
        (("--at", "5"), "at: got 5, expected one of the numbers of nodes [4, 8, 16"),
        (("--algorithms", "sgpp"), "unknown algorithm 'sgpp'"),
        (("--algorithms", "auto"), "auto() chooses during training"),
        (
            ("--nodes", "4,5", "--algorithms", "d_psgd('bipartite')"),
            "d_psgd('bipartite') on 5 nodes: ",
        ),
        (("--report", "/nowhere/plan.html", "--nodes", "4"), "report: got '/nowhere/plan.html'"),
    ],
)
def test_wrong_options_are_refused_in_one_line(
    tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    done = plan("--profile", str(write(tmp_path)), *words)
    assert done.exit_code == 2, done.output
    assert message in done.output
    assert "Traceback" not in done.output


def test_a_profile_does_not_hide_that_the_script_is_missing(tmp_path: Path) -> None:
    kept, missing = str(write(tmp_path)), str(tmp_path / "trian.py")
    for words in ((missing,), (missing, "--profile", kept), (str(tmp_path), "--profile", kept)):
        done = plan(*words, "--nodes", "4", "--algorithms", "ddp")
        assert done.exit_code == 2
        assert f"script: got {words[0]!r}, which is not a file; give a training" in done.output
    (tmp_path / "train.py").write_text("raise SystemExit(3)")
    done = plan(str(tmp_path / "train.py"), "--profile", kept, "--nodes", "4", "--json")
    assert done.exit_code == 0
    assert done.stderr == f"profile: read from {kept}, the script was not run\n"
    assert plan("--profile", kept, "--nodes", "4", "--json").stderr == ""


def test_a_profile_in_a_folder_that_is_missing_is_refused_before_the_script_runs(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit(3)")
    done = plan(str(tmp_path / "train.py"), "--profile", str(tmp_path / "none" / "profile.json"))
    assert done.exit_code == 2
    assert "whose folder does not exist" in done.output


def test_without_a_script_and_a_profile_both_ways_are_named(tmp_path: Path) -> None:
    for words in ((), ("--profile", str(tmp_path / "none.json"))):
        done = plan(*words)
        assert done.exit_code == 2
        assert "give a training script to measure, or a profile written by hand" in done.output


def test_the_first_of_equally_fast_methods_is_chosen() -> None:
    found, where = profile(100_000), fabric(4)

    def row(name: str, factor: float) -> Row:
        made = predict(offbeat.alone(), found.on_device(1 / factor), where)
        return Row(name, 4, 1.0, made)

    rows = [row("first", 2.0), row("second", 1.0 * CLOSE * 0.99), row("third", 1.0)]
    assert choose(rows).name == "second"
    assert choose(rows[:1]).name == "first"


def test_late_steps_cost_a_method_that_waits_more() -> None:
    found, where = profile(1000), fabric(64)
    stragglers = Stragglers(late_share=0.01, late_factor=3.0)
    waits = seconds("ddp", found, where) * 1.3
    late = predict(offbeat.ddp(), found, where, stragglers)
    assert late.seconds > waits
    assert late.parts.stragglers > 0.3 * late.parts.compute


def test_batches_that_follow_the_speeds_spare_the_wait_for_a_slow_rank() -> None:
    found, where = profile(1000), fabric(4)
    alone, equal, balanced = (
        predict(offbeat.ddp(), found, where, Stragglers(**more)).seconds
        for more in ({}, {"first_factor": 2.0}, {"first_factor": 2.0, "balanced": True})
    )
    compute = found.compute
    assert equal - alone == pytest.approx(compute, rel=0.01)
    assert balanced - alone == pytest.approx(compute / 7, rel=0.01), "4 / 3.5"


def test_the_speed_that_is_kept_is_the_measured_one() -> None:
    """Beside one of four workers at half speed, with equal batches, batches and steps by speed."""
    results = Path(__file__).parents[2] / "bench" / "results" / "ddp" / "unequal.json"
    step = Profile.by_size([Parameter("w", 65_792)], 0.32, 0.0, 0.0, Speeds.of_bandwidth(1e10))
    where = Fabric(nodes=4, rate=1e10, latency=1e-4)
    slow = {"equal": {"first_factor": 2.0}, "by speed": {"first_factor": 2.0, "balanced": True}}
    for each in json.loads(results.read_text())["measured"]:
        stragglers = Stragglers(**slow.get(each["batches"], {}))
        kept = predict(offbeat.algorithm(each["method"]), step, where, stragglers).kept
        found = [made / alone for made, alone in zip(each["samples"], each["alone"], strict=True)]
        assert kept == pytest.approx(median(found), abs=0.05), each


def test_4096_ranks_and_all_methods_take_seconds() -> None:
    """No bound on the speed of a machine: twice as many ranks take about twice as long."""
    found = profile(*[100_000] * 30)

    def taken(nodes: int) -> float:
        begun = time.process_time()
        for text in ("ddp", "sgp", "diloco(every=10)", "ad_psgd", "adasum"):
            seconds(text, found, fabric(nodes))
        return time.process_time() - begun

    taken(64)
    assert taken(2048) < 8 * taken(512) + 0.5


def test_the_report_is_one_file_that_fetches_nothing(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    path = tmp_path / "plan.html"
    words = ("--profile", str(write(tmp_path)), "--nodes", "4,8", "--algorithms", FEW)
    done = plan(*words, "--report", str(path))
    assert done.exit_code == 0, done.output
    text = path.read_text("utf-8")
    assert re.findall(r"""(?:src|href|action)=(?!"data:,")|@import|url\(|https?:""", text) == []
    assert text.count('<div class="stack">') == 4
    assert len(re.findall(r"<tr><th scope=\"row\">[\d.]+ [MG]bit/s", text)) == 7
    for heading in ("Time per step", "Where a step goes", "Which method, where"):
        assert f"<h2>{heading}</h2>" in text
    assert "convergence" in text
