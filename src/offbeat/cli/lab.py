"""The command line: ``offbeat lab``."""

import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from offbeat.cli.link_options import ALL, NEAR, parse_numbers, with_links
from offbeat.kit.imports import quiet_imports
from offbeat.kit.terminal import exit_codes, terminable
from offbeat.lab.emulated import Lab
from offbeat.lab.faults import Cut, Fault, Kill, Straggler
from offbeat.lab.network.links import LinkOptions
from offbeat.lab.output import OnLine

DEFAULT_NODES = 4
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

Command = Annotated[
    list[str] | None,
    typer.Argument(help="Command that every rank runs, after `--`.", show_default=False),
]
Nodes = Annotated[
    int | None,
    typer.Option(
        help="Number of nodes. Default: the length of the list in --procs-per-node, or "
        f"{DEFAULT_NODES} if that is a single number."
    ),
]
ProcsPerNode = Annotated[
    str,
    typer.Option(
        metavar="N[,N...]",
        help="Ranks per node: one number for all nodes, or one per node, as in 2,1.",
    ),
]
Rate = Annotated[
    str | None,
    typer.Option(
        metavar="RATE",
        help="Rate of each node's link in each direction, for example 250mbit or 1gbit. Default: "
        "no limit.",
    ),
]
Stragglers = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NODE:FRACTION",
        help="Let a node compute only this fraction of the time, for example 2:0.5. Repeatable.",
    ),
]
Cuts = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NODE@START-END",
        help="Take a node's link down for a time, for example 1@10s-15s. Repeatable.",
    ),
]
Kills = Annotated[
    list[str] | None,
    typer.Option(
        metavar="RANK@TIME",
        help="Kill a rank with SIGKILL, for example 3@20s. Repeatable. Implies --keep-going.",
    ),
]
KeepGoing = Annotated[
    bool, typer.Option("--keep-going", help="Do not terminate the other ranks when a rank fails.")
]
Algorithm = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        help="Algorithm that offbeat.algorithm() returns in the script, for example sgp(overlap=1)."
        " Sets OFFBEAT_ALGORITHM.",
    ),
]
LogDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Write the output of each rank to a file in this folder, not to the terminal.",
    ),
]
Check = Annotated[
    bool, typer.Option("--check", help="Measure the links with Gloo instead of running a command.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result of --check as JSON.")]


@with_links(*ALL)
def lab(
    context: typer.Context,
    command: Command = None,
    nodes: Nodes = None,
    procs_per_node: ProcsPerNode = "1",
    rate: Rate = None,
    far: LinkOptions = NEAR,
    straggler: Stragglers = None,
    cut: Cuts = None,
    kill: Kills = None,
    keep_going: KeepGoing = False,
    algorithm: Algorithm = None,
    log_dir: LogDir = None,
    check: Check = False,
    as_json: Json = False,
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
        runner = Lab(*layout(nodes, procs_per_node, far["sites"]), rate, **far)
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


def layout(
    nodes: int | None, procs_per_node: str, sites: Sequence[int] = ()
) -> tuple[int, int | list[int]]:
    """Parse the number of nodes, and the ranks per node (one number, or one per node).

    >>> layout(None, "2,1"), layout(None, "2"), layout(None, "1", (4, 4, 6))
    ((2, [2, 1]), (4, 2), (14, 1))
    """
    expected = "a number, or one per node separated by commas; for example 2,1"
    counts = parse_numbers("processes per node", procs_per_node, expected)
    if nodes is None:
        nodes = sum(sites) or (DEFAULT_NODES if len(counts) == 1 else len(counts))
    return nodes, counts[0] if len(counts) == 1 else counts


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
