"""Running benchmarks one after the other, each in a process of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from bench.harness import files
from bench.harness.catalogue import Bench
from bench.harness.environment import environment
from bench.harness.files import console


def command_of(bench: Bench, full: bool) -> list[str]:
    """The command of a benchmark; ``--full`` where it has that option."""
    wanted = ["--full"] if full and bench.full_minutes is not None else []
    return [sys.executable, "-m", "bench", "one", bench.name, *wanted]


def execute(
    benches: Sequence[Bench], full: bool = False,
    command: Callable[[Bench, bool], list[str]] = command_of,
) -> dict[str, int]:  # fmt: skip
    """Run all, whichever of them fail; their exit codes, without those after an interrupt."""
    minutes = [(full and bench.full_minutes) or bench.minutes for bench in benches]
    console.print(f"{len(benches)} benchmarks, about {sum(minutes):g} minutes")
    codes: dict[str, int] = {}
    try:
        for number, (bench, expected) in enumerate(zip(benches, minutes, strict=True), 1):
            about = f"{number} of {len(benches)}, about {expected:g} minutes"
            console.rule(f"{bench.name}: {about}")
            began = time.monotonic()
            code = codes[bench.name] = _run(bench, command(bench, full))
            ended = f"failed, exit code {code}" if code else "done"
            console.print(f"{bench.name}: {ended} after {time.monotonic() - began:.0f} s")
    except KeyboardInterrupt:
        console.print("interrupted")
    return codes


def _run(bench: Bench, command: Sequence[str]) -> int:
    env = os.environ | environment(bench.gpu) | {"PYTHONUNBUFFERED": "1"}
    # In a session of its own: a terminal would interrupt it too, and twice ends its clean-up.
    with subprocess.Popen(command, cwd=files.ROOT, env=env, start_new_session=True) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            process.wait()
            raise
