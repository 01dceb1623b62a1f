"""The command line: ``offbeat store``."""

import json
import socket
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.live import Live

from offbeat.kit.imports import quiet_imports
from offbeat.kit.terminal import exit_codes, print_line, terminable

if TYPE_CHECKING:
    from offbeat.store import Status

LOOK = 0.25  # seconds between two looks at the signs
EPILOG = """
Examples:

- offbeat store --port 29400 --workers 4

- offbeat store --port 29400 --workers 4 --page 8080

- offbeat store --port 29400 --settle 60 --name resnet --json

- OFFBEAT_STORE=host:29400 torchrun --standalone --max-restarts 1000 train.py
"""


def store(
    port: Annotated[int, typer.Option(help="Port of the store, on all interfaces.")] = 29400,
    workers: Annotated[
        int | None,
        typer.Option(help="Number of processes that start a run; later ones may join it."),
    ] = None,
    settle: Annotated[
        float | None,
        typer.Option(
            help="Seconds after the first process in which the others come, instead of --workers.",
            show_default="10",
        ),
    ] = None,
    name: Annotated[
        str,
        typer.Option(
            help="Name of the runs: a process with OFFBEAT_STORE=host:port/NAME joins no other."
        ),
    ] = "",
    page: Annotated[
        int | None, typer.Option(help="Port of a page with the status, and of /status.json.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the status as JSON, a line for each change.")
    ] = False,
) -> None:
    """Host the rendezvous of a run outside its workers, and show how it goes.

    Start training scripts with OFFBEAT_STORE=host:port. The store is a TCPStore of torch: it holds
    no model and no gradients, and needs no GPU. If it ends, start it again at the same address
    within a minute: no step is lost. With OFFBEAT_TOKEN it takes workers with the same token only.
    Nothing is encrypted, and whoever reaches the port can write: use it in a private network.

    Exit codes: 0 after SIGTERM, 130 after Ctrl-C; 2 for invalid options or a port that is taken.
    """
    with quiet_imports():
        from offbeat.platform.tcp_store import host_store
        from offbeat.store import History, Runs, served
        from offbeat.transport.run.rendezvous import About
    with (
        exit_codes("interrupted; the ranks wait for a store for a minute"),
        terminable(lambda number: sys.exit(0)),
        ExitStack() as stack,
    ):
        _validate(workers, settle)
        server = host_store(port)
        about = About(name, workers)
        runs = Runs(server, about, 10.0 if settle is None else settle)
        history = History(runs)
        status = history.look()
        if page is not None:
            there = stack.enter_context(served(page, lambda: status))
            typer.echo(f"status page: http://{socket.gethostname()}:{there}/", err=True)
        display = Display(f"{socket.gethostname()}:{server.port}", as_json, stack)
        while True:
            display.show(status)
            time.sleep(LOOK)
            runs.look(time.monotonic())
            status = history.look()


class Display:
    """The status on a terminal, or a line for each change."""

    def __init__(self, address: str, as_json: bool, stack: ExitStack) -> None:
        """Tell the address."""
        self._address, self._json, self._last = address, as_json, ""
        self._console = Console()
        self._live: Live | None = None
        typer.echo(f"store: OFFBEAT_STORE={address}", err=True)
        if self._console.is_terminal and not as_json:
            self._live = stack.enter_context(Live(console=self._console, auto_refresh=False))

    def show(self, status: "Status") -> None:
        """Show it if it has changed: on a terminal each step, elsewhere the members."""
        if self._live is not None:
            self._live.update(status.table(self._address), refresh=True)
            return
        change = repr((status.run, status.state, status.waiting, status.lost, status.joined))
        change += repr([member.rank for member in status.members])
        if change != self._last:
            self._last = change
            print_line(self._console, json.dumps(asdict(status)) if self._json else status.line)


def _validate(workers: int | None, settle: float | None) -> None:
    if workers is not None and settle is not None:
        raise ValueError(
            "--workers and --settle exclude each other: a run starts with so many processes, or "
            "with those that come in that time; remove one"
        )
    if workers is not None and workers < 1:
        raise ValueError(f"--workers {workers}, expected the number of processes, at least 1")
    if settle is not None and not 0 <= settle < 86400:
        raise ValueError(f"--settle {settle}, expected seconds, less than a day")
