"""Seconds per step of the SGP task in real processes on emulated nodes."""

from collections.abc import Sequence

import torch.distributed as dist

from bench.harness.ranks import on_nodes
from bench.sgp.task import Case, Data, Outcome, data, label, net, train

RATE = "25mbit"  # of a node's link: the model takes 0.14 s


def in_lab(cases: Sequence[Case], rate: str | None = RATE) -> list[Outcome]:
    """Train real processes on emulated nodes, case by case; all cases have one world size."""
    outcomes: list[Outcome] = on_nodes(train_all, (list(cases), data()), cases[0].world, rate=rate)
    return outcomes


def train_all(question: tuple[list[Case], Data]) -> list[Outcome]:
    """Train all cases, on every rank."""
    outcomes = []
    cases, parts = question
    for case in cases:
        everyone: list[Outcome] = [None] * case.world  # type: ignore[list-item]
        dist.all_gather_object(everyone, train(case, net(case.seed), parts))
        outcomes.append(Outcome.of(everyone))
        if dist.get_rank() == 0:
            print(f"{label(case)}: {outcomes[-1].seconds * 1e3:.0f} ms a step", flush=True)
    return outcomes
