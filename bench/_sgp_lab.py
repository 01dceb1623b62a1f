"""The task of `_sgp.py` in real processes on emulated nodes: what a step takes.

This file is also the script that every rank runs.
"""

import pickle
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from _sgp import Case, Outcome, console, data, net, said, train

from offbeat.compare import network

RATE = "25mbit"  # of a node's link: the model takes 0.14 s


def in_lab(cases: Sequence[Case], rate: str | None = RATE) -> list[Outcome]:
    """Train real processes on emulated nodes, case by case; all cases have one world size."""
    last = deque[str](maxlen=30)

    def show(rank: int | None, line: str) -> None:
        last.append(line)
        if rank == 0:
            console.print(line, style="dim", markup=False)

    with tempfile.TemporaryDirectory() as name, network(cases[0].world, 1, rate) as (lab, unshaped):
        if unshaped and rate:
            console.print(unshaped)
        file = Path(name, "cases")
        file.write_bytes(pickle.dumps((list(cases), data())))
        if lab.run([sys.executable, __file__, str(file)], on_line=show):
            raise RuntimeError("a rank failed:\n" + "\n".join(last))
        return pickle.loads(file.read_bytes())


def run_rank(file: Path) -> None:
    """One process in the lab: train all cases; rank 0 leaves the outcomes where the cases were."""
    dist.init_process_group("gloo")
    outcomes = []
    cases, parts = pickle.loads(file.read_bytes())
    for case in cases:
        everyone: list[Outcome] = [None] * case.world  # type: ignore[list-item]
        dist.all_gather_object(everyone, train(case, net(case.seed), parts))
        outcomes.append(Outcome.of(everyone))
        if dist.get_rank() == 0:
            print(f"{said(case)}: {outcomes[-1].seconds * 1e3:.0f} ms a step", flush=True)
    if dist.get_rank() == 0:
        file.write_bytes(pickle.dumps(outcomes))
    dist.destroy_process_group()


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]))
