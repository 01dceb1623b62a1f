"""The page with the status in a real browser, and its JSON."""

import contextlib
import io
import json
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from browser import PROGRAM, SCREENSHOTS, TOO_WIDE, Browser
from offbeat.store import page
from offbeat.store.page import served
from offbeat.store.status import Change, Member, Status

MEMBERS = [
    Member(0, "node-a", 120, "trains", 0.2),
    Member(2, "<b>node</b>", 119, "trains", 0.4),
    Member(None, "node-c", 0, "silent for 7 s", 7.1),
]
STATUS = Status(
    *("resnet", 3, "training", 4, 1, 120, MEMBERS),
    *([Change(1, 80)], [Change(2, 100), Change(3, 101)], 6.4),
)


def read(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def test_json() -> None:
    with served(0, lambda: STATUS) as port:
        found = json.loads(read(port, "/status.json"))
        assert found["members"][0] == {
            **{"rank": 0, "node": "node-a", "step": 120, "state": "trains", "silent": 0.2}
        }
        assert (found["lost"], found["seconds_lost"]) == ([{"rank": 1, "step": 80}], 6.4)
        with pytest.raises(urllib.error.HTTPError):
            read(port, "/else")
        with pytest.raises(ValueError, match=f"--page {port}"), served(port, lambda: STATUS):
            pass


def test_the_table_shows_names_as_they_are() -> None:
    member = Member(0, "rack[/a]", 1, "trains", 0.2)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(replace(STATUS, members=[member]).table("[fe80::1]:29500"))
    text = console.export_text()
    assert "rack[/a]" in text
    assert "store [fe80::1]:29500" in text


def test_idle_connections_are_few_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process hosts the store, which needs its threads and descriptors."""
    monkeypatch.setattr(page, "MOST", 5)
    monkeypatch.setattr(page, "IDLE", 2.0)
    before = threading.active_count()
    with served(0, lambda: STATUS) as port, contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        until = time.monotonic() + 30
        while time.monotonic() < until:
            assert threading.active_count() <= before + 1 + 5
            with contextlib.suppress(OSError):  # while the five are there
                assert read(port, "/")
                break
            time.sleep(0.1)
        else:
            pytest.fail("idle connections do not end")


def test_a_browser_that_has_gone_is_no_error(capfd: pytest.CaptureFixture[str]) -> None:
    long = "x" * 10**7
    with served(0, lambda: replace(STATUS, name=long)) as port:
        for _ in range(2):
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.send(b"GET /status.json HTTP/1.0\r\n\r\n")
                client.recv(1)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert read(port, "/")
    assert capfd.readouterr().err == ""


@pytest.mark.processes
def test_page_in_a_browser(tmp_path: Path) -> None:
    if PROGRAM is None:
        pytest.skip("needs a browser: apt-get install chromium")
    shown = [STATUS]
    with Browser(tmp_path) as browser, served(0, lambda: shown[0]) as port:
        for width, scheme in ((1280, "light"), (360, "dark")):
            browser.open(f"http://127.0.0.1:{port}/", width, scheme)
            wait_for(browser, "document.querySelectorAll('tbody tr').length", 3)
            assert browser.complaints() == []
            assert browser.ask("document.documentElement.scrollWidth") == width
            assert browser.ask(TOO_WIDE) == []
            text = browser.ask("document.body.innerText")
            for part in ("resnet, run 3: training", "<b>node</b>", "6.4", "silent for 7 s"):
                assert part in text
            assert "rank 1 was lost at step 80" in text
            browser.screenshot(SCREENSHOTS / f"store-{width}-{scheme}.png")
        shown[0] = Status("resnet", 3, "ended", 4, 0, 120, [], [], [], 0.0)
        wait_for(browser, "document.getElementById('state').textContent", "resnet, run 3: ended")


def wait_for(browser: Browser, expression: str, value: object) -> None:
    until = time.monotonic() + 20
    while browser.ask(expression) != value:
        assert time.monotonic() < until, (browser.ask("document.body.innerText"), value)
        time.sleep(0.1)
