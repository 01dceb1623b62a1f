"""Waiting time of the other ranks when one is late, by overlap.

One of 4 workers loses its link for 5 s, or gets a quarter of its CPU time. Needs root.
"""

import time
from collections.abc import Iterator
from functools import partial
from itertools import product

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from bench.harness import Bench, Claim, Result, command
from bench.harness.attached import attach
from bench.harness.ranks import on_nodes
from offbeat.lab import Cut, Fault, Straggler

RATE, WORKERS, STEPS, LATE = "250mbit", 4, 150, 1
WORK = 0.02  # seconds of CPU time that a step computes; a stopped process makes no progress
CUT_AT, CUT_SECONDS, SHARE = 8.0, 5.0, 0.25  # ranks take about 5 s to start
OVERLAPS = (0, 1, 4)
CUT, SLOW = f"no link for {CUT_SECONDS:g} s", f"{SHARE:.0%} of its CPU"
FAULTS: dict[str, list[Fault]] = {
    "none": [],
    CUT: [Cut(LATE, CUT_AT, CUT_AT + CUT_SECONDS)],
    SLOW: [Straggler(LATE, SHARE)],
}
BOUND = 1.05  # times as long as the late node
HEADINGS = ("node 1 has", "overlap", "its mean step", "others'", "its longest", "others'")
BENCH = Bench(name="sgp/late", claim="Others wait no longer than a rank is late", minutes=4)
Case, Found = tuple[str, int], dict[str, tuple[float, float]]  # fault and overlap; seconds


def measure(overlap: int, fault: str) -> Found:
    """Mean and longest step of the late node, and of the slowest other one."""
    ended = on_nodes(train, f"sgp(overlap={overlap})", WORKERS, rate=RATE, faults=FAULTS[fault])
    steps = [*map(np.diff, ended)]
    own = steps.pop(LATE)
    mean = float(own.mean()), max(float(each.mean()) for each in steps)
    return {"mean": mean, "longest": (float(own.max()), max(float(each.max()) for each in steps))}


def rows(case: Case, found: Found) -> Iterator[tuple[str, ...]]:
    mean = (f"{seconds * 1e3:.0f} ms" for seconds in found["mean"])
    yield case[0], f"{case[1]}", *mean, *(f"{seconds:.2f} s" for seconds in found["longest"])


def claims(case: Case, found: Found) -> Iterator[Claim]:
    """On the longest step where a link was cut: connections wait for their own TCP timers."""
    fault, overlap = case
    text = f"overlap {overlap}, {fault}: others wait hardly longer than node 1"
    if fault == CUT:
        own, others = found["longest"]
        bound = f"at most {BOUND * own:.2f} s"
        yield Claim(text, bound, f"{others:.2f} s", others <= BOUND * own)
    elif fault == SLOW:
        own, others = found["mean"]
        bound = f"at most {BOUND * own * 1e3:.0f} ms a step"
        yield Claim(text, bound, f"{others * 1e3:.0f} ms", others <= BOUND * own)


def train(algorithm: str) -> list[list[float]]:
    """A small regression, on every rank; when the steps of each rank ended."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 8))
    teacher = torch.randn(64, 8) / 8

    def loss(module: nn.Module, random: torch.Generator) -> Tensor:
        end, x = time.process_time() + WORK, torch.randn(32, 64, generator=random)
        while time.process_time() < end:
            pass
        return (module(x) - x @ teacher).square().mean()

    run, times = attach(algorithm, model, partial(SGD, lr=0.02, momentum=0.9)), [time.monotonic()]
    for _ in range(STEPS):
        run.step(loss)
        times.append(time.monotonic())
    run.finish()
    run.close()
    everyone: list[list[float]] = [[]] * WORKERS
    dist.all_gather_object(everyone, times)
    return everyone


@command(BENCH)
def app() -> Result:
    """Delay a node and measure the delay of the others."""
    found = {case[::-1]: measure(*case) for case in product(OVERLAPS, FAULTS)}
    title = f"{WORKERS} workers, {STEPS} steps, {RATE}"
    return Result.by_case(title, HEADINGS, found, rows, claims)
