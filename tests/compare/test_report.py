"""The report in a real browser: narrow and wide, in the light and the dark colour scheme."""

import base64
import fcntl
import itertools
import json
import math
import os
import re
import select
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
from test_compare import Line, finish, heldout, step, write_run
from typer.testing import CliRunner

from offbeat.cli import app
from offbeat.compare import Experiment, Run, parse_methods, summarize, write_report
from offbeat.compare.report import load_template
from offbeat.compare.result import Setup
from offbeat.compare.timeline import timelines

SCREENSHOTS = Path(__file__).parents[2] / "runs" / "screenshots"
ALGORITHMS = "ddp,local_sgd(every=8),local_sgd(every=4),sgp,sgp('ring')"
PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe"),
)
# Every element that reaches beyond the window, but for the table, which scrolls in its own box.
TOO_WIDE = """
[...document.querySelectorAll("body *")]
  .filter(e => !e.closest(".scroll table, .sr") && e.getBoundingClientRect().right > innerWidth + 1)
  .map(e => e.tagName + "." + e.className)
"""
OVERLAPPING_LABELS = """
[...document.querySelectorAll(".plot")].flatMap(plot => {
  const boxes = [...plot.querySelectorAll(".label")].map(e => e.getBoundingClientRect());
  boxes.sort((a, b) => a.top - b.top);
  return boxes.slice(1).map((box, i) => boxes[i].bottom - box.top).filter(overlap => overlap > 1.5);
})
"""


class Browser:
    """Chromium, controlled over a pair of pipes by its DevTools protocol."""

    def __init__(self, profile: Path) -> None:
        assert PROGRAM is not None, "tests without a browser are skipped"
        # High numbers, so that neither is what the other will be called in there.
        reading, self._write = (self._high(end) for end in os.pipe())
        self._read, writing = (self._high(end) for end in os.pipe())
        self._news = select.poll()
        self._news.register(self._read, select.POLLIN)
        quiet = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
        pipes = [(os.POSIX_SPAWN_DUP2, reading, 3), (os.POSIX_SPAWN_DUP2, writing, 4)]
        command = [PROGRAM, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._pid = os.posix_spawn(PROGRAM, command, os.environ, file_actions=[*quiet, *pipes])
        os.close(reading)
        os.close(writing)
        self._numbers, self._rest = itertools.count(1), b""
        self._session: dict[str, str] = {}
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._session = {"sessionId": session}
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    @staticmethod
    def _high(descriptor: int) -> int:
        high: int = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
        os.close(descriptor)
        return high

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its result; what happens meanwhile goes to ``events``."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params, **self._session}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != number:
            self.events.append(answer)
        assert "error" not in answer, answer["error"]
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, path: Path, width: int, scheme: str) -> None:
        """Show a file in a window of this width, and wait until it has loaded."""
        phone = width < 500
        self.call(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": 800, "deviceScaleFactor": 1 + phone, "mobile": phone},
        )
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive())

    def complaints(self) -> list[dict[str, Any]]:
        """What the console has shown since the page was opened."""
        loud = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")
        return [event for event in self.events if event["method"] in loud]

    def ask(self, expression: str) -> Any:
        """The value of some JavaScript."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return answer["result"]["value"]

    def screenshot(self, path: Path) -> bytes:
        """Keep a picture of the whole page, however long."""
        width, height = self.ask("[innerWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture := base64.b64decode(shot["data"]))
        return picture

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert self._news.poll(60_000), "the browser is silent"
            got = os.read(self._read, 2**16)
            assert got, "the browser has gone"
            self._rest += got
        message, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._session = {}
        if error is None:
            self.call("Browser.close")
        os.close(self._write)  # it ends with its pipe, whatever state it is in
        os.waitpid(self._pid, 0)
        os.close(self._read)


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
    setup = Setup("train.py", (), (1, 1), 10**9, None, "today", "torch")
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
    with pytest.raises(ValueError, match=re.escape("pip install 'offbeat[report]'")):
        load_template()
    (tmp_path / "train.py").touch()
    words = ["compare", str(tmp_path / "train.py"), "--algorithms", "ddp"]
    done = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "out")])
    assert done.exit_code == 2
    assert "--no-report" in done.output
    assert not (tmp_path / "out").exists()
