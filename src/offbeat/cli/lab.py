"""The command line: ``offbeat lab``."""

import io
import os
import sys
from collections.abc import Callable

import typer
from rich.console import Console

from offbeat.cli import lab_options as options
from offbeat.cli.link_options import ALL, NEAR, with_links
from offbeat.kit.imports import quiet_imports
from offbeat.kit.terminal import exit_codes, terminable
from offbeat.lab.emulated import Lab
from offbeat.lab.injection.faults import Cut, Kill, Straggler
from offbeat.lab.injection.injection import Fault
from offbeat.lab.network.links import LinkOptions
from offbeat.lab.output import OnLine

COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red")
# Options after the first word of the command belong to the command: --help and --nodes too.
SETTINGS = {"allow_interspersed_args": False}
EPILOG = """
Examples:

- offbeat lab --nodes 4 --rate 250mbit -- python train.py --lr 0.1

- offbeat lab --rate 250mbit --algorithm 'sgp(overlap=1)' -- python train.py

- offbeat lab --nodes 2 --procs-per-node 2,1 --rate 1gbit --log-dir logs -- python train.py

- offbeat lab --rate 250mbit --straggler 2:0.5 --cut 1@10s-15s --kill 3@20s -- python train.py

- offbeat lab --up 20mbit --down 100mbit --latency 50ms --jitter 5ms --loss 0.1% -- python train.py

- offbeat lab --sites 4,4,6 --between 60ms@200mbit --between 0-2:75ms@100mbit -- python train.py

- offbeat lab --check --nodes 4 --rate 250mbit --json
"""


@with_links(*ALL)
def lab(
    context: typer.Context,
    command: options.Command = None,
    nodes: options.Nodes = None,
    procs_per_node: options.ProcsPerNode = "1",
    rate: options.Rate = None,
    far: LinkOptions = NEAR,
    straggler: options.Stragglers = None,
    cut: options.Cuts = None,
    kill: options.Kills = None,
    keep_going: options.KeepGoing = False,
    algorithm: options.Algorithm = None,
    log_dir: options.LogDir = None,
    check: options.Check = False,
    as_json: options.Json = False,
) -> None:
    """Run a script on emulated nodes with slow or far links, stragglers, failures and killed ranks.

    Runs any script that torchrun can run, whether or not it uses offbeat. Each node has a network
    namespace and reaches only the other nodes. Needs root and iproute2.

    Nodes and ranks are numbered from 0. Times are in seconds since the start of the ranks,
    written as 10, 10s or 1.5s.

    Exit codes: that of the first rank that failed (128 + n for signal n), after which the other
    ranks are terminated; 0 if no rank failed. A rank killed by --kill has not failed. 2 for
    invalid options, or if networks cannot be emulated on this machine.
    """
    code = 0
    with exit_codes("interrupted; all ranks have been terminated"):
        given: list[tuple[Callable[[str], Fault], list[str] | None]] = [
            (Straggler.parse, straggler),
            (Cut.parse, cut),
            (Kill.parse, kill),
        ]
        faults = [parse(text) for parse, texts in given for text in texts or ()]
        runner = Lab(*options.layout(nodes, procs_per_node, far["sites"]), rate, **far)
        # The program passes the function: a lab knows no recipes.
        env: dict[str, str] = {} if algorithm is None else context.obj(algorithm)
        _validate_options(runner, command or [], env, faults, check, as_json)
        with terminable(lambda number: sys.exit(128 + number)), runner:
            if check:
                _print_measurements(runner, as_json)
            else:
                code = runner.run(
                    command or [],
                    env=env,
                    faults=faults,
                    keep_going=keep_going,
                    log_dir=log_dir,
                    on_line=line_printer(),
                )
    raise typer.Exit(code)


def line_printer() -> OnLine:
    """Return a callback that prints lines of ranks with a prefix, and the lab's to stderr."""
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for characters outside the terminal's encoding

    def print_line(rank: int | None, line: str) -> None:
        if rank is None:
            typer.echo(f"[lab] {line}", err=True)
            return
        prefix = f"[{rank}]"
        if colour:
            prefix = typer.style(prefix, fg=COLOURS[rank % len(COLOURS)])
        typer.echo(f"{prefix} {line}")

    return print_line


def _validate_options(
    runner: Lab,
    command: list[str],
    env: dict[str, str],
    faults: list[Fault],
    check: bool,
    as_json: bool,
) -> None:
    if as_json and not check:
        raise ValueError("--json applies to --check only; add --check, or remove --json")
    if not check:
        runner.validate(command, faults=faults)
    elif command or env or faults:
        raise ValueError(
            "--check runs its own measurement and takes no command, no --algorithm and no faults; "
            "remove them, or remove --check"
        )
    else:
        with quiet_imports():
            from offbeat.lab.check import require_two_nodes
        require_two_nodes(runner.cluster)


def _print_measurements(runner: Lab, as_json: bool) -> None:
    from offbeat.lab.check import measure_links

    duration = "half a minute" if runner.links.delays else "a few seconds"
    with Console(stderr=True).status(f"measuring the links, {duration}"):  # on terminals only
        figures = measure_links(runner)
    if as_json:
        typer.echo(figures.to_json())
    else:
        if figures.paths:
            Console().print(figures.paths_table())
        Console().print(figures.table())
