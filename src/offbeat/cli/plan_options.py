"""The options of ``offbeat plan``, as typer reads them."""

from pathlib import Path
from typing import Annotated

import typer

from offbeat.cli.compare_options import Arguments, EnvOnly

__all__ = ["Arguments", "EnvOnly"]

Script = Annotated[
    Path | None,
    typer.Argument(
        help="Training script in Python that accepts --algorithm TEXT and --steps N, or see "
        "--env-only. Not needed with a --profile that exists.",
        show_default=False,
    ),
]
Nodes = Annotated[
    str | None,
    typer.Option(
        metavar="N,N,...",
        help="Numbers of nodes, separated by commas. Default: 4,8,16,64,256,1024,4096, or those of "
        "--sites.",
    ),
]
RanksPerNode = Annotated[int, typer.Option(metavar="N", help="Ranks on every node.")]
Rate = Annotated[
    str, typer.Option(metavar="RATE", help="Rate of each node's link, for example 1gbit.")
]
Latency = Annotated[
    str,
    typer.Option(
        metavar="TIME",
        help="Time of a message beside its bytes from one node to another, half a round trip, for "
        "example 100us; with --sites, inside of one.",
    ),
]
Connections = Annotated[
    int, typer.Option(metavar="N", help="Connections of two nodes, as OFFBEAT_CONNECTIONS.")
]
Inside = Annotated[
    str, typer.Option(metavar="RATE", help="Rate between the ranks of a node, in each direction.")
]
HalfDuplex = Annotated[
    bool, typer.Option("--half-duplex", help="Links carry one direction at a time.")
]
Jitter = Annotated[
    str | None,
    typer.Option(
        metavar="measured|PERCENT",
        help="How much steps differ: as in the profile, or a standard deviation such as 5%. "
        "Default: measured, if the profile has it.",
    ),
]
Late = Annotated[
    str | None,
    typer.Option(
        metavar="PERCENT:FACTORx",
        help="Share of steps that take longer, and how much: 1%:3x.",
    ),
]
Straggler = Annotated[
    str | None,
    typer.Option(
        metavar="FRACTION", help="Let one rank compute only this fraction of the time: 0.5."
    ),
]
Balanced = Annotated[
    bool,
    typer.Option(
        "--balanced", help="Sizes of batches follow the speeds of ranks, with --straggler."
    ),
]
Algorithms = Annotated[
    str | None,
    typer.Option(
        metavar="A,B,...",
        help="Algorithms, separated by commas, in the order of preference. `offbeat recipes` "
        "lists them. Default: all kinds, with within='local' if nodes have several ranks.",
    ),
]
Baseline = Annotated[
    str | None,
    typer.Option(
        metavar="ALGORITHM", help="Reference for speed-ups. Default: the first algorithm."
    ),
]
DeviceFactor = Annotated[
    float,
    typer.Option(metavar="FACTOR", help="How much faster the nodes compute than the profile."),
]
ProfileFile = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        metavar="FILE",
        help="Read the profile from this file if it exists, else measure and write it.",
    ),
]
Steps = Annotated[int, typer.Option(help="Optimizer steps of the profile, passed as --steps.")]
At = Annotated[
    int | None,
    typer.Option(
        "--at",
        metavar="N",
        help="Number of nodes to show in detail and to recommend for. Default: the last one.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of the tables.")]
Report = Annotated[
    Path | None, typer.Option(metavar="FILE.html", help="Write an HTML report to this file.")
]
