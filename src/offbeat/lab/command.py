"""The command line of the lab: ``offbeat lab``."""

import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType

import typer
from rich.console import Console

from offbeat.lab import options
from offbeat.lab.check import measure, require
from offbeat.lab.emulated import Lab
from offbeat.lab.fault import Fault
from offbeat.lab.faults import Cut, Kill, Straggler
from offbeat.lab.output import OnLine

COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red")
# What follows the first word of the command is the command's: --help and --nodes too.
SETTINGS = {"allow_interspersed_args": False}
EPILOG = """
Examples:

- offbeat lab --nodes 4 --rate 250mbit -- python train.py --lr 0.1

- offbeat lab --nodes 2 --procs-per-node 2,1 --rate 1gbit --log-dir logs -- python train.py

- offbeat lab --rate 250mbit --straggler 2:0.5 --cut 1@10s-15s --kill 3@20s -- python train.py

- offbeat lab --check --nodes 4 --rate 250mbit --json
"""


def lab(
    command: options.Command = None,
    nodes: options.Nodes = None,
    procs_per_node: options.ProcsPerNode = "1",
    rate: options.Rate = None,
    straggler: options.Stragglers = None,
    cut: options.Cuts = None,
    kill: options.Kills = None,
    keep_going: options.KeepGoing = False,
    log_dir: options.LogDir = None,
    check: options.Check = False,
    as_json: options.Json = False,
) -> None:
    """Run a script on emulated nodes: slow links, slow nodes, cut links, killed ranks.

    Any script that torchrun can run, with or without offbeat inside. Every node has a network of
    its own, and reaches nothing but the other nodes. Times are in seconds since all ranks have
    started, as 10, 10s or 1.5s. Needs root and iproute2.

    The exit code is that of the first rank that failed (128 + n for signal n), whereupon the
    others are ended; 0 if none did. A rank killed by --kill has not failed. It is 2 for wrong
    options, or where the lab cannot run.
    """
    code = 0
    try:
        faults = _faults(straggler, cut, kill)
        place = Lab(*options.layout(nodes, procs_per_node), rate)
        _require_sense(place, command or [], faults, check, as_json)
        with _leaving_on_signals(), place:
            if check:
                _check(place, as_json)
            else:
                code = place.run(
                    command or [],
                    faults=faults,
                    keep_going=keep_going,
                    log_dir=log_dir,
                    on_line=printer(),
                )
    except ValueError as error:
        typer.echo(str(error), err=True)
        code = 2
    except KeyboardInterrupt:
        typer.echo("interrupted; all ranks have been ended", err=True)
        code = 128 + signal.SIGINT
    raise typer.Exit(code)


def printer() -> OnLine:
    """Prints the ranks' lines with a coloured prefix, and the lab's own to standard error."""
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # ranks may print what this terminal cannot

    def print_line(rank: int | None, line: str) -> None:
        if rank is None:
            typer.echo(f"[lab] {line}", err=True)
            return
        prefix = f"[{rank}]"
        if colour:
            prefix = typer.style(prefix, fg=COLOURS[rank % len(COLOURS)])
        typer.echo(f"{prefix} {line}")

    return print_line


@contextlib.contextmanager
def _leaving_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP leave by an exception, so that everything is cleaned up on the way."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # nohup
            signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _faults(
    straggler: list[str] | None, cut: list[str] | None, kill: list[str] | None
) -> list[Fault]:
    kinds: list[tuple[Callable[[str], Fault], list[str] | None]] = [
        (Straggler.parse, straggler),
        (Cut.parse, cut),
        (Kill.parse, kill),
    ]
    return [parse(text) for parse, texts in kinds for text in texts or ()]


def _require_sense(
    place: Lab, command: list[str], faults: list[Fault], check: bool, as_json: bool
) -> None:
    if as_json and not check:
        raise ValueError("--json says how --check prints its figures; add --check, or leave it")
    if not check:
        place.check(command, faults=faults)
    elif command or faults:
        raise ValueError(
            "--check runs its own measurement, but a command or a fault was given too; leave "
            "that away, or leave --check away"
        )
    else:
        require(place.world)


def _check(place: Lab, as_json: bool) -> None:
    try:
        with Console(stderr=True).status("measuring, some seconds"):  # shown on terminals only
            figures = measure(place)
    except RuntimeError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(figures.to_json())
    else:
        Console().print(figures.table())
