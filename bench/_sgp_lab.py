"""The task of `_sgp.py` in real processes on emulated nodes: what a step takes.

This file is also the script that every rank runs.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from _ranks import on_nodes, run_rank
from _sgp import Case, Data, Outcome, data, net, said, train

RATE = "25mbit"  # of a node's link: the model takes 0.14 s


def in_lab(cases: Sequence[Case], rate: str | None = RATE) -> list[Outcome]:
    """Train real processes on emulated nodes, case by case; all cases have one world size."""
    outcomes: list[Outcome] = on_nodes(__file__, (list(cases), data()), cases[0].world, rate=rate)
    return outcomes


def train_all(question: tuple[list[Case], Data]) -> list[Outcome]:
    """Train all cases."""
    outcomes = []
    cases, parts = question
    for case in cases:
        everyone: list[Outcome] = [None] * case.world  # type: ignore[list-item]
        dist.all_gather_object(everyone, train(case, net(case.seed), parts))
        outcomes.append(Outcome.of(everyone))
        if dist.get_rank() == 0:
            print(f"{said(case)}: {outcomes[-1].seconds * 1e3:.0f} ms a step", flush=True)
    return outcomes


if __name__ == "__main__":
    run_rank(Path(sys.argv[2]), train_all)
