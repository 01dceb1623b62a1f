"""The options of ``offbeat lab``, as typer reads them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from offbeat.cli.link_options import parse_numbers

DEFAULT_NODES = 4

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
