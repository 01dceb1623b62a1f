"""The command line: ``offbeat compare``."""

import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType

import typer
from rich.console import Console

from offbeat.compare import options
from offbeat.compare.experiment import Experiment, parse_methods
from offbeat.compare.report.report import load_template
from offbeat.compare.run import open_runner
from offbeat.compare.session import Session
from offbeat.lab import Runner

EPILOG = """
Examples:

- offbeat compare train.py --algorithms 'ddp,local_sgd(every=8),sgp' --rate 250mbit --steps 60

- offbeat compare train.py --algorithms sgp --baseline torch-ddp --compute-only -- --lr 0.1

- offbeat compare train.py --algorithms ddp,sgp --env-only -- --max_steps 60

- offbeat compare train.py --algorithms ddp,sgp --json | jq '.results[].seconds_per_step'
"""


def compare(
    script: options.Script,
    algorithms: options.Algorithms,
    arguments: options.Arguments = None,
    nodes: options.Nodes = None,
    procs_per_node: options.ProcsPerNode = "1",
    rate: options.Rate = None,
    steps: options.Steps = None,
    rounds: options.Rounds = 3,
    baseline: options.Baseline = None,
    compute_only: options.ComputeOnly = False,
    target_loss: options.TargetLoss = None,
    env_only: options.EnvOnly = False,
    out: options.Out = None,
    report: options.Report = True,
    as_json: options.Json = False,
) -> None:
    """Compare the speed and the loss of several algorithms on one training script.

    The script must accept --algorithm TEXT, and --steps N if --steps is given. It must call
    offbeat.replicate(model, offbeat.algorithm(TEXT)) and, to record losses, replica.report_loss.
    A script without these options calls offbeat.algorithm() and is run with --env-only.

    The algorithms run in turn, for several rounds, since the speed of a machine varies over time.
    The command prints a table and writes compare.json, report.html and the recordings.

    With --rate, the ranks run on emulated nodes behind links of that rate (see offbeat lab),
    which needs root and iproute2. Otherwise they run over the loopback interface, without a
    limit.

    Exit codes: 0 on success, 1 if a run failed, 2 for invalid options, 130 after Ctrl-C. With 1
    and 130, the results so far are still reported.
    """
    code = 0
    try:
        methods, against = parse_methods(algorithms, baseline, compute_only)
        experiment = Experiment(
            script, methods, against, tuple(arguments or ()), steps, rounds, target_loss, env_only
        )
        if report:
            load_template()  # a missing jinja2 is reported before the runs, not after them
        count, per_node = options.layout(nodes, procs_per_node)
        runner = open_runner(count, per_node, rate)
        folder = out or Path("runs") / time.strftime("compare-%Y%m%d-%H%M%S")
        session = Session(experiment, folder, Console(stderr=True))
        code = _run_session(session, runner)
    except ModuleNotFoundError as missing:
        typer.echo(f"{missing}, or skip the report by --no-report", err=True)
        raise typer.Exit(2) from None
    except ValueError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    if comparison := session.write(report):
        if as_json:
            typer.echo(comparison.to_json())
        else:
            session.show(comparison)
    raise typer.Exit(code)


def _run_session(
    session: Session, opened: AbstractContextManager[tuple[Runner, str | None]]
) -> int:
    """Run all methods and return the exit code."""
    try:
        with _interruptible(), opened as (runner, unshaped):
            session.run(runner, unshaped)
    except KeyboardInterrupt:
        session.console.print("interrupted; all ranks have been terminated")
        return 128 + signal.SIGINT
    return 1 if any(run.failure for run in session.runs) else 0


@contextmanager
def _interruptible() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP like Ctrl-C: terminate the ranks and write the results so far."""
    kinds = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, _interrupt) for number in kinds]
    try:
        yield
    finally:
        for number, handler in zip(kinds, before, strict=True):
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
