"""A function of a bench on every rank of emulated nodes; what rank 0 found comes back."""

import pickle
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from offbeat.compare import network

console = Console(highlight=False)


def on_nodes(script: str, case: Any, nodes: int, procs: int = 1, rate: str | None = None) -> Any:
    """``script --rank FILE`` on every rank, which calls :func:`run_rank` with that file.

    Without root links are as fast as the machine's loopback, and that is said.
    """
    last = deque[str](maxlen=30)

    def show(rank: int | None, line: str) -> None:
        last.append(line)
        if rank == 0:
            console.print(line, style="dim", markup=False)

    with tempfile.TemporaryDirectory() as folder, network(nodes, procs, rate) as (place, unshaped):
        if unshaped and rate:
            console.print(unshaped)
        file = Path(folder, "case")
        file.write_bytes(pickle.dumps(case))
        if place.run([sys.executable, script, "--rank", str(file)], on_line=show):
            raise RuntimeError("a rank failed:\n" + "\n".join(last))
        return pickle.loads(file.read_bytes())


def run_rank(file: Path, work: Callable[[Any], Any]) -> None:
    """One process: ``work(case)`` on all ranks; what it returns on rank 0 replaces the case."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = work(pickle.loads(file.read_bytes()))
    dist.barrier()
    if dist.get_rank() == 0:
        file.write_bytes(pickle.dumps(found))
    dist.destroy_process_group()
