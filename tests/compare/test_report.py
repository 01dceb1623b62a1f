"""The report in a real browser: narrow and wide, in the light and the dark colour scheme."""

import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_compare import Line, finish, heldout, step, write_run
from typer.testing import CliRunner

from browser import OVERLAPPING_LABELS, PROGRAM, SCREENSHOTS, TOO_WIDE, Browser
from offbeat.cli import app
from offbeat.compare import Experiment, Run, parse_methods, summarize, write_report
from offbeat.compare.report.page import ROOM
from offbeat.compare.report.timeline import timelines
from offbeat.compare.result import Setup
from offbeat.kit.page import load_template

ALGORITHMS = "ddp,local_sgd(every=8),local_sgd(every=4),sgp,sgp('ring')"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if PROGRAM is None:
        pytest.skip("needs a browser: apt-get install chromium")
    with Browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


def steps_of(method: str, rank: int, number: int) -> list[Line]:
    """A run of four ranks, as it might be: sixty steps, an evaluation after every tenth."""
    lines = []
    every = {"ddp": 1, "local_sgd(every=8)": 8, "local_sgd(every=4)": 4, "alone": 61}.get(method, 1)
    for k in range(60):
        forward, backward = 0.08 + 0.001 * ((k + rank) % 3), 0.24 + 0.002 * ((k + number) % 5)
        loss = 1.3 + 3 * math.exp(-k / (8 + every)) + 0.03 * math.sin(5 * k + rank)
        spans = [["forward", 0.0, forward], ["backward", forward, backward]]
        sends = (k + 1) % every == 0
        end = backward + 0.5 * sends
        if sends:
            first = forward if method == "ddp" else backward
            spans += [["stall", backward, end], ["exchange:world", first, end]]
        more = {"loss": loss, "spans": spans}
        lines.append(step(end + 0.02, 18.3e6 * sends, 0.5 * sends, **more))
        if k % 10 == 9:
            lines.append(heldout(loss + 0.05))
    return [*lines, finish(0.1 * every)]


def write_page(folder: Path, algorithms: str = ALGORITHMS) -> Path:
    """A report with everything in it, a method that failed and text that must be escaped."""
    methods, baseline = parse_methods(algorithms, compute_only=True)
    (folder / "train.py").touch()
    experiment = Experiment(folder / "train.py", methods, baseline, rounds=2)
    runs = []
    for number, method in experiment.run_order():
        home = folder / f"{number}-{method.slug}"
        ranks = [steps_of(method.text, rank, number) for rank in range(4)]
        runs.append(Run(method, number, write_run(home, ranks), code=0))
    runs[-2].code, runs[-2].failed_rank = 137, 3
    runs[-2].last_lines = ["Traceback (most recent call last):", "  <module> " + "x" * 300]
    arguments = ("--note", "<script>console.log('escaped?')</script>")
    notes = "the network has no rate limit, ranks run over the loopback interface"
    setup = Setup("char_gpt.py", arguments, (1, 1, 1, 1), None, notes, "today", "torch 2.13.0")
    write_report(
        summarize(experiment, setup, runs), timelines(experiment, runs), folder / "report.html"
    )
    return folder / "report.html"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
def test_page_in_a_browser(browser: Browser, tmp_path: Path, width: int, scheme: str) -> None:
    browser.open(write_page(tmp_path), width, scheme)
    assert browser.complaints() == []
    assert browser.ask("document.documentElement.scrollWidth") == width
    assert browser.ask(TOO_WIDE) == []
    assert browser.ask(OVERLAPPING_LABELS) == []
    headings = browser.ask('[...document.querySelectorAll("h3")].map(e => e.textContent)')
    assert headings[-2:] == ["Loss over time", "Loss over steps"]
    assert browser.ask('document.querySelectorAll("tbody tr").length') == 6
    box = "document.querySelector('.scroll')"
    assert browser.ask(f"{box}.scrollWidth > {box}.clientWidth") == (width == 360)
    picture = browser.screenshot(SCREENSHOTS / f"report-{width}-{scheme}.png")
    assert len(picture) > 50_000
    red, green, blue = browser.ask("getComputedStyle(document.body).backgroundColor.match(/\\d+/g)")
    assert (int(red) + int(green) + int(blue) > 384) == (scheme == "light")


def test_page_is_one_file_that_fetches_nothing(tmp_path: Path) -> None:
    text = write_page(tmp_path).read_text()
    fetching = r"""(?:src|href|action)=(?!"data:,")|@import|url\(|https?:"""
    assert re.findall(fetching, text) == []
    assert "<script" not in text
    assert "&lt;script&gt;console" in text
    assert "width=device-width" in text
    assert len(text) < 300_000


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ([step(loss=1.0)], 0),  # one step of a method alone
        ([step()] * 5, 0),  # no loss, no spans
        ([step(), heldout(2.0)] * 3, 0),  # held-out loss alone
        ([step(loss=float("nan"))] * 5, 0),
        ([step()] * 5, 1),
        ([step()] * 5, None),
        ([], None),
    ],
)
def test_page_does_without_what_is_not_known(
    tmp_path: Path, lines: list[Line], code: int | None
) -> None:
    methods, baseline = parse_methods("sgp")
    (tmp_path / "train.py").touch()
    experiment = Experiment(tmp_path / "train.py", methods, baseline)
    runs = [Run(methods[0], 1, write_run(tmp_path / "run", [lines, lines]), code=code)]
    setup = Setup("train.py", (), (1, 1), 10**9, None, "today", "torch", "1 Gbit/s")
    write_report(
        summarize(experiment, setup, runs), timelines(experiment, runs), tmp_path / "report.html"
    )
    text = (tmp_path / "report.html").read_text()
    assert "train.py on 2 nodes, 1 Gbit/s" in text
    assert ("Loss over time" in text) == any(
        "loss" in line and line["loss"] in (1, 2) for line in lines
    )
    assert "nan" not in re.sub(r"<style>.*?</style>", "", text, flags=re.DOTALL)


def test_without_jinja2_the_fix_is_named_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ModuleNotFoundError, match=re.escape("pip install '.[report]'")):
        load_template(ROOM)
    (tmp_path / "train.py").touch()
    words = ["compare", str(tmp_path / "train.py"), "--algorithms", "ddp"]
    done = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "out")])
    assert done.exit_code == 2
    assert "--no-report" in done.output
    assert not (tmp_path / "out").exists()
