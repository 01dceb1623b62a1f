"""Running benchmarks one after the other, each in a process of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.harness import files
from bench.harness.catalogue import Bench
from bench.harness.environment import environment
from bench.harness.files import console


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


def execute(
    benches: Sequence[Bench],
    full: bool = False,
    command: Callable[[Bench, bool], list[str]] = command_of,
) -> list[Outcome]:
    """Run all, whichever of them fail; those that an interrupt prevents are left out."""
    minutes = [(full and bench.full_minutes) or bench.minutes for bench in benches]
    console.print(f"{len(benches)} benchmarks, about {sum(minutes):g} minutes")
    outcomes: list[Outcome] = []
    try:
        for number, (bench, expected) in enumerate(zip(benches, minutes, strict=True), 1):
            about = f"{number} of {len(benches)}, about {expected:g} minutes"
            console.rule(f"{bench.name}: {about}")
            outcomes.append(_run(bench, command(bench, full)))
    except KeyboardInterrupt:
        console.print("interrupted")
    return outcomes


def _run(bench: Bench, command: Sequence[str]) -> Outcome:
    """Run one benchmark, which prints to this terminal."""
    began = time.monotonic()
    env = os.environ | environment(bench.gpu) | {"PYTHONUNBUFFERED": "1"}
    # In a session of its own: a terminal would interrupt it too, and twice ends its clean-up.
    with subprocess.Popen(command, cwd=files.ROOT, env=env, start_new_session=True) as process:
        try:
            process.wait()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            process.wait()
            raise
    outcome = Outcome(bench, process.returncode, time.monotonic() - began)
    ended = "done" if outcome.code == 0 else f"failed, exit code {outcome.code}"
    console.print(f"{bench.name}: {ended} after {outcome.seconds:.0f} s")
    return outcome
