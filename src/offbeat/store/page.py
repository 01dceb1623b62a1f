"""The status for browsers: one page, which reads ``/status.json`` once per second."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from threading import Semaphore, Thread
from typing import Any, final

from offbeat.store.status import Status

MOST = 64  # connections at a time
IDLE = 5.0  # seconds for which an idle one is kept
PAUSE = 0.2  # seconds


@final
class _Server(ThreadingHTTPServer):
    """Leaves the process what the store needs: sockets, and the terminal."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._free = Semaphore(MOST)

    def verify_request(self, request: object, client_address: object) -> bool:
        """Refuse a connection beside many others."""
        return self._free.acquire(blocking=False)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and make place for another one."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection; where that fails, as without free descriptors, wait."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(PAUSE)
            raise

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing of a browser that has gone."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


@contextmanager
def served(port: int, status: Callable[[], Status]) -> Iterator[int]:
    """Serve the page on ``port``, 0 for a free one; yields it. Raises ``ValueError`` if taken."""
    page = files("offbeat.store").joinpath("page.html").read_text(encoding="utf-8")
    style = files("offbeat.kit").joinpath("report.css").read_text(encoding="utf-8")
    html = page.replace("/*style*/", style).encode()

    @final
    class Handler(BaseHTTPRequestHandler):
        """Answers two paths."""

        timeout = IDLE

        def do_GET(self) -> None:
            """Answer a browser."""
            if self.path == "/":
                self._send(200, "text/html; charset=utf-8", html)
            elif self.path == "/status.json":
                self._send(200, "application/json", json.dumps(asdict(status())).encode())
            else:
                self._send(404, "text/plain", b"expected / or /status.json")

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing: the terminal shows the table."""

        def _send(self, code: int, kind: str, body: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            with suppress(ConnectionError):  # of a browser that has gone
                self.end_headers()
                self.wfile.write(body)

    try:
        server = _Server(("", port), Handler)
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"--page {port}: no page can be served there ({error}); pass another port"
        ) from None
    with server:
        Thread(target=server.serve_forever, name="offbeat-page", daemon=True).start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
