"""The options of ``offbeat compare``, as typer reads them."""

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_NODES = 4

Script = Annotated[
    Path, typer.Argument(help="A Python script that accepts --algorithm.", show_default=False)
]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[-- ARGS...]", help="What else the script gets, after `--`.", show_default=False
    ),
]
Algorithms = Annotated[
    str,
    typer.Option(
        metavar="A,B,...",
        help="What to compare; commas in parentheses belong to the algorithm. "
        "See `offbeat recipes`.",
        show_default=False,
    ),
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
        help="What every node's link carries each way, as in 250mbit; needs root and iproute2. "
        "Else loopback, unlimited.",
    ),
]
Steps = Annotated[int | None, typer.Option(help="Passed on to the script as --steps.")]
Rounds = Annotated[int, typer.Option(help="How often each method runs.")]
Baseline = Annotated[
    str | None,
    typer.Option(
        metavar="ALGORITHM",
        help="What others are compared with, for example torch-ddp; by default the first.",
    ),
]
ComputeOnly = Annotated[
    bool, typer.Option("--compute-only", help="Measure a step without communication too.")
]
TargetLoss = Annotated[
    float | None,
    typer.Option(
        metavar="LOSS",
        help="Training loss to be reached in the shortest time; by default the worst final one.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Folder to write into; by default runs/compare-TIME."),
]
Report = Annotated[bool, typer.Option(help="Write report.html.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")]


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
