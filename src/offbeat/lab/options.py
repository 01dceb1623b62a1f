"""The options of ``offbeat lab``, as typer reads them."""

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_NODES = 4

Command = Annotated[
    list[str] | None,
    typer.Argument(help="What every rank runs, after `--`.", show_default=False),
]
Nodes = Annotated[
    int | None,
    typer.Option(
        help="Nodes; by default as many as --procs-per-node has numbers, or "
        f"{DEFAULT_NODES} if that is one number."
    ),
]
ProcsPerNode = Annotated[
    str,
    typer.Option(
        metavar="N[,N...]", help="Ranks on each node: one number, or one for each node as in 2,1."
    ),
]
Rate = Annotated[
    str | None,
    typer.Option(
        metavar="RATE",
        help="What every node's link carries each way, as in 250mbit or 1gbit; else unlimited.",
    ),
]
Stragglers = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NODE:FRACTION",
        help="A node that computes only this fraction of the time. Repeatable, like the next two.",
    ),
]
Cuts = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NODE@START-END", help="A node whose link is down meanwhile, as in 1@10s-15s."
    ),
]
Kills = Annotated[
    list[str] | None,
    typer.Option(
        metavar="RANK@TIME", help="A rank that gets SIGKILL, as in 3@20s. Implies --keep-going."
    ),
]
KeepGoing = Annotated[
    bool, typer.Option("--keep-going", help="Let the others go on when a rank fails.")
]
LogDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Folder for the output, one file a rank, instead of the terminal."
    ),
]
Check = Annotated[
    bool, typer.Option("--check", help="Measure the links with Gloo; runs no command.")
]
Json = Annotated[bool, typer.Option("--json", help="With --check: print JSON instead of a table.")]


def layout(nodes: int | None, procs_per_node: str) -> tuple[int, int | list[int]]:
    """How many nodes, and how many ranks on each.

    >>> layout(None, "2,1"), layout(None, "2")
    ((2, [2, 1]), (4, 2))
    """
    try:
        counts = [int(count) for count in procs_per_node.split(",")]
    except ValueError:
        raise ValueError(
            f"processes per node: got {procs_per_node!r}, expected a number, or one for each node "
            "by commas; for example 2,1"
        ) from None
    if len(counts) == 1:
        return DEFAULT_NODES if nodes is None else nodes, counts[0]
    return len(counts) if nodes is None else nodes, counts
