"""Running benchmarks one after the other, each in a process of its own, with live progress."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from bench.harness import files
from bench.harness.bench import Bench
from bench.harness.console import console
from bench.harness.environment import environment

Command = Callable[[Bench, bool], list[str]]


@dataclass(frozen=True)
class Outcome:
    """How the process of a benchmark ended."""

    bench: Bench
    code: int
    seconds: float


def command_of(bench: Bench, full: bool) -> list[str]:
    """The command of a benchmark; ``--full`` where it has that option."""
    wanted = ["--full"] if full and bench.full_minutes is not None else []
    return [sys.executable, "-m", "bench", "one", bench.name, *wanted]


def minutes(bench: Bench, full: bool) -> float:
    """How long it is expected to take."""
    return bench.full_minutes if full and bench.full_minutes is not None else bench.minutes


def execute(
    benches: Sequence[Bench], full: bool = False, command: Command = command_of
) -> list[Outcome]:
    """Run all, whichever of them fail; those that an interrupt prevents are left out."""
    total = sum(minutes(bench, full) for bench in benches)
    console.print(f"{len(benches)} benchmarks, about {total:g} minutes")
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(24)
    times = TimeElapsedColumn(), TextColumn("of about {task.total:g} min")
    outcomes: list[Outcome] = []
    with Progress(*columns, *times, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=total)
        try:
            for number, bench in enumerate(benches, 1):
                shown = f"{number} of {len(benches)}, {bench.name}, {minutes(bench, full):g} min"
                progress.update(bar, description=shown)
                outcomes.append(_run(bench, command(bench, full)))
                progress.advance(bar, minutes(bench, full))
        except KeyboardInterrupt:
            console.print("interrupted")
    return outcomes


def _run(bench: Bench, command: Sequence[str]) -> Outcome:
    """Run one benchmark; what it prints appears above the progress."""
    console.rule(bench.name)
    began = time.monotonic()
    shown = {"PYTHONUNBUFFERED": "1", "COLUMNS": f"{console.width}"}
    env = os.environ | environment(bench.gpu) | shown
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command,
        cwd=files.ROOT,
        env=env,
        stdout=pipe,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # a terminal would interrupt it too, and twice ends its clean-up
    ) as process:
        try:
            _show(process)
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            _show(process)
            raise
    outcome = Outcome(bench, process.returncode, time.monotonic() - began)
    ended = "done" if outcome.code == 0 else f"failed, exit code {outcome.code}"
    console.print(f"{bench.name}: {ended} after {outcome.seconds:.0f} s")
    return outcome


def _show(process: subprocess.Popen[str]) -> None:
    """Print what the process prints until it ends."""
    assert process.stdout is not None, "output is piped"
    for line in process.stdout:
        console.print(line.rstrip("\n"), markup=False, soft_wrap=True)
    process.wait()
