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
from offbeat.compare.report import template
from offbeat.compare.run import open_runner
from offbeat.compare.session import Session
from offbeat.lab import Runner

Network = AbstractContextManager[tuple[Runner, str | None]]
EPILOG = """
Examples:

- offbeat compare train.py --algorithms 'ddp,local_sgd(every=8),sgp' --rate 250mbit --steps 60

- offbeat compare train.py --algorithms sgp --baseline torch-ddp --compute-only -- --lr 0.1

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
    out: options.Out = None,
    report: options.Report = True,
    as_json: options.Json = False,
) -> None:
    """Run one script under several methods on a slow network, and compare what they do.

    The script must accept --algorithm TEXT (and --steps N, if that is given here) and call
    offbeat.replicate with it; for losses, replica.report_loss. Methods take turns, since machines
    drift. Prints a table, and writes compare.json, report.html and all recordings.

    Without root, or without --rate, the ranks talk over this machine's loopback, as fast as that
    is. The exit code is 1 if a run failed, 2 for wrong options, 130 after Ctrl-C; what was
    measured until then is reported all the same.
    """
    code = 0
    try:
        methods, against = parse_methods(algorithms, baseline, compute_only)
        plan = Experiment(
            script, methods, against, tuple(arguments or ()), steps, rounds, target_loss
        )
        if report:
            template()  # before hours are spent
        count, per_node = options.layout(nodes, procs_per_node)
        place = open_runner(count, per_node, rate)
        folder = out or Path("runs") / time.strftime("compare-%Y%m%d-%H%M%S")
        session = Session(plan, folder, Console(stderr=True))
        code = _carry_out(session, place)
    except ValueError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    if comparison := session.write(report):
        if as_json:
            typer.echo(comparison.to_json())
        else:
            session.show(comparison)
    raise typer.Exit(code)


def _carry_out(session: Session, network: Network) -> int:
    """Run everything; the exit code."""
    try:
        with _interruptible(), network as (place, unshaped):
            session.carry_out(place, unshaped)
    except KeyboardInterrupt:
        session.console.print("interrupted; all ranks have been ended")
        return 128 + signal.SIGINT
    return 1 if any(run.failure for run in session.runs) else 0


@contextmanager
def _interruptible() -> Iterator[None]:
    """Other signals than Ctrl-C do the same: everything ends, what was measured is written."""
    kinds = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, _interrupt) for number in kinds]
    try:
        yield
    finally:
        for number, handler in zip(kinds, before, strict=True):
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
