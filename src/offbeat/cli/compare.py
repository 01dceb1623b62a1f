"""The command line: ``offbeat compare``."""

import signal
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console

from offbeat.cli.lab import Nodes, ProcsPerNode, Stragglers, layout
from offbeat.cli.link_options import ALL, NEAR, with_links
from offbeat.kit.imports import quiet_imports
from offbeat.kit.page import load_template
from offbeat.kit.terminal import exit_codes, terminable
from offbeat.lab import Runner
from offbeat.lab.faults import Straggler
from offbeat.lab.network.links import LinkOptions

if TYPE_CHECKING:
    from offbeat.compare import Session

EPILOG = """
Examples:

- offbeat compare train.py --algorithms 'ddp,local_sgd(every=8),sgp' --rate 250mbit --steps 60

- offbeat compare train.py --algorithms 'ddp,diloco' --sites 2,2 --between 60ms@100mbit --steps 60

- offbeat compare train.py --algorithms sgp --baseline torch-ddp --compute-only -- --lr 0.1

- offbeat compare train.py --algorithms 'ddp,sgp' --straggler 1:0.5 --steps 60

- offbeat compare train.py --algorithms ddp,sgp --env-only -- --max_steps 60

- offbeat compare train.py --algorithms ddp,sgp --json | jq '.results[].seconds_per_step'
"""

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


@with_links(*ALL)
def compare(
    script: Script,
    algorithms: Algorithms,
    arguments: Arguments = None,
    nodes: Nodes = None,
    procs_per_node: ProcsPerNode = "1",
    rate: Rate = None,
    far: LinkOptions = NEAR,
    straggler: Stragglers = None,
    steps: Steps = None,
    rounds: Rounds = 3,
    baseline: Baseline = None,
    compute_only: ComputeOnly = False,
    target_loss: TargetLoss = None,
    env_only: EnvOnly = False,
    out: Out = None,
    report: Report = True,
    as_json: Json = False,
) -> None:
    """Compare the speed and the loss of several algorithms on one training script.

    The script must accept --algorithm TEXT, and --steps N if --steps is given. It must call
    offbeat.replicate(model, offbeat.algorithm(TEXT)) and, to record losses, replica.report_loss.
    A script without these options calls offbeat.algorithm() and is run with --env-only.

    The algorithms run in turn, for several rounds, since the speed of a machine varies over time.
    The command prints a table and writes compare.json, report.html and the recordings.

    With --rate, --latency or another property of links, the ranks run on emulated nodes (see
    offbeat lab), which needs root and iproute2. Otherwise they run over the loopback interface,
    without a limit.

    Exit codes: 0 on success, 1 if a run failed, 2 for invalid options, 130 after Ctrl-C. With 1
    and 130, the results so far are still reported.
    """
    with quiet_imports():
        from offbeat.compare import Experiment, Session, open_runner, parse_methods
    with exit_codes("interrupted"):
        methods, against = parse_methods(algorithms, baseline, compute_only)
        chosen = tuple(arguments or ()), steps, rounds, target_loss, env_only
        slow = tuple(map(Straggler.parse, straggler or ()))
        experiment = Experiment(script, methods, against, *chosen, stragglers=slow)
        if report:  # a missing jinja2 is reported before the runs, not after them
            _require_template()
        count, per_node = layout(nodes, procs_per_node, far["sites"])
        runner = open_runner(count, per_node, rate, **far)
        folder = out or Path("runs") / time.strftime("compare-%Y%m%d-%H%M%S")
        session = Session(experiment, folder, Console(stderr=True))
        code = _run_session(session, runner)
    if comparison := session.write(report):
        if as_json:
            typer.echo(comparison.to_json())
        else:
            session.show(comparison)
    raise typer.Exit(code)


def _require_template() -> None:
    try:
        load_template("offbeat.compare.report")
    except ModuleNotFoundError as missing:
        raise ValueError(f"{missing}, or skip the report by --no-report") from None


def _run_session(
    session: "Session", opened: AbstractContextManager[tuple[Runner, str | None]]
) -> int:
    """Run all methods and return the exit code."""
    try:
        with terminable(_interrupt), opened as (runner, unshaped):
            session.run(runner, unshaped)
    except KeyboardInterrupt:
        session.console.print("interrupted; all ranks have been terminated")
        return 128 + signal.SIGINT
    return 1 if any(run.failure for run in session.runs) else 0


def _interrupt(number: int) -> NoReturn:
    """Treat SIGTERM and SIGHUP like Ctrl-C: terminate the ranks and write the results so far."""
    raise KeyboardInterrupt
