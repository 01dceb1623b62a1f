"""Running a function or a command on every rank of emulated nodes.

As a command it is the process of one rank, which calls a function.
"""

import pickle
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Unpack

import torch
import torch.distributed as dist

from bench.harness.environment import environment
from bench.harness.files import console
from bench.harness.turns import Work, seconds_of
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
        command = [sys.executable, "-m", "bench.harness.ranks", str(file)]
        run(runner, command, gpu=gpu, faults=faults)
        return pickle.loads(file.read_bytes())


def largest(value: float) -> float:
    """On any rank."""
    found = torch.tensor(float(value), dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def seconds_together(work: Work) -> float:
    """Seconds of one call on the slowest rank; all ranks start together."""
    dist.barrier()
    return largest(seconds_of(work))


def main(path: str) -> None:
    """Call the pickled function with its case; the result of rank 0 replaces both."""
    file = Path(path)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    work, case = pickle.loads(file.read_bytes())
    found = work(case)
    dist.barrier()
    if dist.get_rank() == 0:
        file.write_bytes(pickle.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
