"""Chromium for tests of reports, and what must hold of every page."""

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any, Self

SCREENSHOTS = Path(__file__).parents[1] / "runs" / "screenshots"
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

    def open(self, page: Path | str, width: int, scheme: str) -> None:
        """Show a file or address in a window of this width, and wait until it has loaded."""
        phone = width < 500
        self.call(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": 800, "deviceScaleFactor": 1 + phone, "mobile": phone},
        )
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self.events.clear()
        self.call("Page.navigate", url=page if isinstance(page, str) else page.as_uri())
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
