"""The report in a real browser: narrow and wide, in the light and the dark colour scheme."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from clusters import fabric, profile

from browser import OVERLAPPING_LABELS, PROGRAM, SCREENSHOTS, TOO_WIDE, Browser
from offbeat.compare import parse_methods
from offbeat.plan import Speeds, Stragglers
from offbeat.plan.result import Setup
from offbeat.planner.arguments import DEFAULT
from offbeat.planner.question import Question, make_plan, win_map
from offbeat.planner.report.page import write_report


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if PROGRAM is None:
        pytest.skip("needs a browser: apt-get install chromium")
    with Browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="module")
def question() -> Question:
    found = profile(100_000, 300_000, speeds=Speeds.of_bandwidth(1e10))
    methods, baseline = parse_methods(DEFAULT)
    fabrics = tuple(fabric(nodes) for nodes in (4, 16, 256))
    stragglers = Stragglers(jitter=0.05)
    name = "<script>console.log('escaped?')</script>" + "x" * 60
    setup = Setup.of(name, found, fabrics[0], ("5%", "none", "none"), 1.0)
    return Question(setup, methods, baseline, found, fabrics, stragglers)


@pytest.fixture(scope="module")
def page(question: Question, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "plan.html"
    write_report(make_plan(question, 16), win_map(question), path)
    return path


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
def test_page_in_a_browser(browser: Browser, page: Path, width: int, scheme: str) -> None:
    browser.open(page, width, scheme)
    assert browser.complaints() == []
    assert browser.ask("document.documentElement.scrollWidth") == width
    assert browser.ask(TOO_WIDE) == []
    assert browser.ask(OVERLAPPING_LABELS) == []
    assert browser.ask('document.querySelectorAll(".plot path.line").length') == 14
    assert browser.ask('document.querySelectorAll(".stack").length') == 14
    assert browser.ask('document.querySelectorAll(".map tbody td").length') == 21
    colours = '[...document.querySelectorAll(".label")].map(e => getComputedStyle(e).color)'
    assert len(set(browser.ask(colours))) == 14
    assert len(browser.screenshot(SCREENSHOTS / f"plan-{width}-{scheme}.png")) > 50_000


def test_a_map_has_what_would_be_recommended_at_its_rate(question: Question) -> None:
    made, found = make_plan(question, 16), win_map(question)
    at_rate = found.winners[found.rates.index(question.setup.rate)]
    # Few steps of the map, many of the plan: stragglers may tip a choice between equals.
    name, seconds = at_rate[found.nodes.index(16)]
    chosen = {row.name: row.prediction.seconds for row in made.of(16)}
    assert seconds == pytest.approx(chosen[name], rel=0.05)
    fastest = [[seconds for _, seconds in row] for row in found.winners]
    assert all(a[0] >= b[0] * 0.9 for a, b in pairwise(fastest))
