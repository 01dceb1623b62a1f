"""The options of ``offbeat compare``, as typer reads them."""

from pathlib import Path
from typing import Annotated

import typer

from offbeat.cli.lab_options import Nodes, ProcsPerNode, Stragglers, layout

__all__ = ["Nodes", "ProcsPerNode", "Stragglers", "layout"]  # shared with offbeat lab

Script = Annotated[
    Path,
    typer.Argument(
        help="Training script in Python that accepts --algorithm TEXT, or see --env-only.",
        show_default=False,
    ),
]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="ARGS",
        help="Further arguments for the script, after `--`.",
        show_default=False,
    ),
]
Algorithms = Annotated[
    str,
    typer.Option(
        metavar="A,B,...",
        help="Algorithms to compare, separated by commas, as in 'ddp,local_sgd(every=8)'. "
        "`offbeat recipes` lists them.",
        show_default=False,
    ),
]
Rate = Annotated[
    str | None,
    typer.Option(
        metavar="RATE",
        help="Rate of each node's link in each direction, for example 250mbit. Needs root and "
        "iproute2. Default: loopback, no limit.",
    ),
]
Steps = Annotated[
    int | None, typer.Option(help="Optimizer steps per run, passed to the script as --steps.")
]
Rounds = Annotated[int, typer.Option(help="Number of runs per algorithm.")]
Baseline = Annotated[
    str | None,
    typer.Option(
        metavar="ALGORITHM",
        help="Reference for speed-ups, for example torch-ddp. Default: the first algorithm.",
    ),
]
ComputeOnly = Annotated[
    bool,
    typer.Option(
        "--compute-only", help="Also run without communication, to measure the time of computation."
    ),
]
TargetLoss = Annotated[
    float | None,
    typer.Option(
        metavar="LOSS",
        help="Training loss for the time to loss. Default: the highest final loss of all "
        "algorithms.",
    ),
]
EnvOnly = Annotated[
    bool,
    typer.Option(
        "--env-only",
        help="Pass the algorithm in the environment variable OFFBEAT_ALGORITHM only, and no "
        "options: for scripts without --algorithm, which call offbeat.algorithm().",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Output folder. Default: runs/compare-TIME."),
]
Report = Annotated[bool, typer.Option(help="Write report.html.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")]
