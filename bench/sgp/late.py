"""Waiting time of the other ranks when one is late, by overlap.

One of 4 workers loses its link for 5 s, or gets a quarter of its CPU time. Needs root.
"""

import time
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import offbeat
from bench.harness import Bench, Claim, Result, command
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


@dataclass(frozen=True)
class Lateness:
    """Seconds per step of the late node and of the slowest other one."""

    fault: str
    overlap: int
    mean: tuple[float, float]
    longest: tuple[float, float]

    @property
    def row(self) -> tuple[str, ...]:
        mean = [f"{seconds * 1e3:.0f} ms" for seconds in self.mean]
        longest = [f"{seconds:.2f} s" for seconds in self.longest]
        return self.fault, f"{self.overlap}", *mean, *longest

    @property
    def claim(self) -> Claim:
        """Of the longest step where a link was cut: connections wait for their own TCP timers."""
        text = f"overlap {self.overlap}, {self.fault}: others wait hardly longer than node 1"
        if self.fault == CUT:
            bound, others = BOUND * self.longest[0], self.longest[1]
            return Claim(text, f"at most {bound:.2f} s", f"{others:.2f} s", others <= bound)
        bound, others = BOUND * self.mean[0], self.mean[1]
        paper = f"at most {bound * 1e3:.0f} ms a step"
        return Claim(text, paper, f"{others * 1e3:.0f} ms", others <= bound)


def measure(overlap: int, fault: str) -> Lateness:
    ended = on_nodes(train, f"sgp(overlap={overlap})", WORKERS, rate=RATE, faults=FAULTS[fault])
    steps = [*map(np.diff, ended)]
    own = steps.pop(LATE)
    mean = float(own.mean()), max(float(each.mean()) for each in steps)
    longest = float(own.max()), max(float(each.max()) for each in steps)
    return Lateness(fault, overlap, mean, longest)


def train(algorithm: str) -> list[list[float]]:
    """A small regression, on every rank; when the steps of each rank ended."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 8))
    teacher = torch.randn(64, 8) / 8
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    replica = offbeat.replicate(model, offbeat.algorithm(algorithm))
    torch.manual_seed(dist.get_rank())
    times = [time.monotonic()]
    for _ in range(STEPS):
        busy = time.process_time() + WORK
        x = torch.randn(32, 64)
        (model(x) - x @ teacher).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        while time.process_time() < busy:
            pass
        replica.step()
        times.append(time.monotonic())
    replica.finish()
    replica.detach()
    everyone: list[list[float]] = [[]] * WORKERS
    dist.all_gather_object(everyone, times)
    return everyone


@command(BENCH)
def app() -> Result:
    """Delay a node and measure the delay of the others."""
    found = [measure(*each) for each in product(OVERLAPS, FAULTS)]
    judged = [each.claim for each in found if each.fault != "none"]
    title = f"{WORKERS} workers, {STEPS} steps, {RATE}"
    return Result(title, HEADINGS, [each.row for each in found], judged, measured=found)
