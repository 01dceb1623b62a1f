"""When one of four ranks is late, the others wait no longer than it is late. Needs root."""

import time
from functools import partial
from itertools import product

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from bench.harness import Bench, Result, at_most, command
from bench.harness.attached import attach
from bench.harness.ranks import on_nodes
from offbeat.lab import Cut, Straggler

RATE, WORKERS, STEPS, LATE = "250mbit", 4, 150, 1
WORK = 0.02  # seconds of CPU time that a step computes; a stopped process makes no progress
NONE, CUT, SLOW = "none", "no link for 5 s", "25% of its CPU"
FAULTS = {NONE: [], CUT: [Cut(LATE, 8.0, 13.0)], SLOW: [Straggler(LATE, 0.25)]}
MORE = 1.05  # times as long as the late node
HEADINGS = ("node 1 has", "overlap", "its mean step", "others'", "its longest", "others'")
BENCH = Bench(name="sgp/late", minutes=4)


def train(overlap: int) -> list[list[float]]:
    """A small regression, on every rank; when the steps of each rank ended."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 8))
    teacher = torch.randn(64, 8) / 8

    def loss(module: nn.Module, random: torch.Generator) -> Tensor:
        end, x = time.process_time() + WORK, torch.randn(32, 64, generator=random)
        while time.process_time() < end:
            pass
        return (module(x) - x @ teacher).square().mean()

    run = attach(f"sgp(overlap={overlap})", model, partial(SGD, lr=0.02, momentum=0.9))
    ends = [time.monotonic()]
    for _ in range(STEPS):
        run.step(loss)
        ends.append(time.monotonic())
    run.finish()
    run.close()
    everyone: list[list[float]] = [[]] * WORKERS
    dist.all_gather_object(everyone, ends)
    return everyone


@command(BENCH)
def app() -> Result:
    """Delay a node and measure the delay of the others."""
    rows, claims, found = [], [], {}
    for overlap, fault in product((0, 1, 4), FAULTS):
        ended = on_nodes(train, overlap, WORKERS, rate=RATE, faults=FAULTS[fault])
        others = [*map(np.diff, ended)]
        own = others.pop(LATE)
        mean = own.mean(), max(each.mean() for each in others)
        longest = own.max(), max(each.max() for each in others)
        found[fault, overlap] = {"mean": mean, "longest": longest}
        cells = *(f"{1e3 * each:.0f} ms" for each in mean), *(f"{each:.2f} s" for each in longest)
        rows.append((fault, f"{overlap}", *cells))
        text = f"overlap {overlap}, {fault}: others wait hardly longer than node 1"
        if fault == CUT:  # the longest step: connections wait for their own TCP timers
            claims.append(at_most(text, longest[1], MORE * longest[0], "{:.2f} s"))
        elif fault == SLOW:
            claims.append(at_most(text, 1e3 * mean[1], 1e3 * MORE * mean[0], "{:.0f} ms a step"))
    title = f"{WORKERS} workers, {STEPS} steps, {RATE}"
    return Result(title, HEADINGS, rows, claims, found)
