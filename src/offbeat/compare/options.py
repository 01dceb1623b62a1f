"""The options of ``offbeat compare``, as typer reads them."""

from pathlib import Path
from typing import Annotated

import typer

from offbeat.lab.options import Nodes, ProcsPerNode, layout

__all__ = ["Nodes", "ProcsPerNode", "layout"]  # the same as the lab's

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
