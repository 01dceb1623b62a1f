"""Running a function or a command on every rank of emulated nodes."""

import pickle
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Unpack

from bench.harness.console import console
from bench.harness.environment import environment
from offbeat.compare import open_runner
from offbeat.lab import Fault, Runner
from offbeat.lab.network.links import LinkOptions

LAST = 30  # lines of output that an error shows


@contextmanager
def nodes(count: int, procs: int, rate: str | None, **far: Unpack[LinkOptions]) -> Iterator[Runner]:
    """Emulated nodes; without root, the loopback of this machine with a notice."""
    with open_runner(count, procs, rate, **far) as (runner, unshaped):
        if unshaped and rate:
            console.print(unshaped)
        yield runner


def run(
    runner: Runner,
    command: Sequence[str],
    *,
    show: bool = True,
    gpu: bool = False,
    faults: Sequence[Fault] = (),
) -> list[str]:
    """Run a command on every rank; returns what rank 0 printed. With ``gpu`` ranks see GPUs.

    Raises RuntimeError with the last lines of all ranks if one fails.
    """
    last, printed = deque[str](maxlen=LAST), list[str]()

    def on_line(rank: int | None, line: str) -> None:
        last.append(line)
        if rank == 0:
            printed.append(line)
            if show:
                console.print(line, style="dim", markup=False)

    if runner.run(command, env=environment(gpu), faults=faults, on_line=on_line):
        raise RuntimeError("a rank failed:\n" + "\n".join(last))
    return printed


def on_nodes(
    work: Callable[[Any], Any],
    case: Any,
    count: int,
    procs: int = 1,
    rate: str | None = None,
    gpu: bool = False,
    faults: Sequence[Fault] = (),
    **far: Unpack[LinkOptions],
) -> Any:
    """Call ``work(case)`` on every rank; returns the result of rank 0. With ``gpu`` all see GPUs.

    ``far`` are further options of :class:`offbeat.lab.Lab`.
    ``work`` is a function of a module; it, the case and the result can be pickled.
    """
    with tempfile.TemporaryDirectory() as folder, nodes(count, procs, rate, **far) as runner:
        file = Path(folder, "case")
        file.write_bytes(pickle.dumps((work, case)))
        run(runner, [sys.executable, "-m", "bench.harness.rank", str(file)], gpu=gpu, faults=faults)
        return pickle.loads(file.read_bytes())
