"""Real processes on emulated nodes: one script on every rank, one question, one answer."""

import pickle
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console

from offbeat.compare import network

console = Console(highlight=False)


def ask(script: str, question: Any, nodes: int, per_node: int, rate: str | None) -> Any:
    """Run ``script``, which calls :func:`answer`, on every rank of a lab; rank 0's answer."""
    last = deque[str](maxlen=30)

    def show(rank: int | None, line: str) -> None:
        last.append(line)
        if rank == 0:
            console.print(line, style="dim", markup=False)

    with tempfile.TemporaryDirectory() as name, network(nodes, per_node, rate) as (lab, unshaped):
        if unshaped and rate:
            console.print(unshaped)
        file = Path(name, "question")
        file.write_bytes(pickle.dumps(question))
        if lab.run([sys.executable, script, str(file)], on_line=show):
            raise RuntimeError("a rank failed:\n" + "\n".join(last))
        return pickle.loads(file.read_bytes())


def answer(work: Callable[[Any], Any]) -> None:
    """One rank in the lab: do the work; rank 0 leaves its result where the question was."""
    dist.init_process_group("gloo")
    file = Path(sys.argv[1])
    result = work(pickle.loads(file.read_bytes()))
    dist.barrier()  # all have read the question
    if dist.get_rank() == 0:
        file.write_bytes(pickle.dumps(result))
    dist.destroy_process_group()
