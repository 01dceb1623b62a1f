"""Fourteen ranks on three sites: the share of the time in which they compute.

Sites of 4, 4 and 6 ranks are 100 to 150 ms apart, by links of 100 Mbit/s. A model of 1.6 MB pauses
for a second in a step, which is the computing; it is that of two rounds after the first one.
"""

import time
from dataclasses import dataclass
from functools import partial
from statistics import fmean

import torch
import torch.distributed as dist

import offbeat
from bench.harness import GOAL, Bench, Claim, Result, command
from bench.harness.attached import attach
from bench.harness.pause import paused
from bench.harness.ranks import on_nodes

SITES, NEAR = (4, 4, 6), "1gbit"
FAR = ["0-1:50ms@100mbit", "0-2:60ms@100mbit", "1-2:75ms@100mbit"]
PAUSE, WIDTH = 1.0, 224
BENCH = Bench(
    name="internet/sites",
    claim="Rare, streaming and sparse exchanges keep three sites computing",
    minutes=8,
)
METHODS = {  # and the goal of each
    "alone": 0.0,
    "ddp": 0.0,
    "sgp(overlap=4,within='local')": 0.0,
    "diloco(every=10)": 0.0,
    "diloco(every=10,within='local')": 0.83,
    "diloco(every=10,fragments=2,delay=3,wire='int8',within='local')": 0.95,
    "sparse_loco(every=10,within='local')": 0.0,
    "sparse_loco(every=20,within='local')": 0.95,
}


@dataclass(frozen=True)
class Share:
    """Of a method: seconds of a step, and the share of them that is computing or waiting."""

    method: str
    step: float
    computing: float
    waiting: float


def race(methods: list[str]) -> list[Share]:
    """Train under every method, on every rank, whose nodes are the sites."""
    ends = [sum(SITES[: i + 1]) for i in range(len(SITES))]
    world = offbeat.World.of(
        [list(range(end - size, end)) for end, size in zip(ends, SITES, strict=True)]
    )
    return [share(method, world) for method in methods]


def share(method: str, world: offbeat.World) -> Share:
    """The mean over ranks, of two rounds after the first one; of ``ddp`` of few steps."""
    task, rare = paused(PAUSE, WIDTH), method not in ("ddp", "alone")
    algorithm = offbeat.algorithm(method)
    run = attach(algorithm, task.model, partial(torch.optim.SGD, lr=1e-3), world)
    every = max(4, getattr(algorithm.parameters, "every", 1))
    lead, counted = (every, 2 * every) if rare else (2, 4)
    for _ in range(lead):
        run.step(task.loss)
    began, before = time.perf_counter(), run.stalled()
    for _ in range(counted):
        run.step(task.loss)
    took, stalled = time.perf_counter() - began, run.stalled() - before
    run.finish()
    run.close()
    ranks: list[tuple[float, float]] = [(0.0, 0.0)] * dist.get_world_size()
    dist.all_gather_object(ranks, (took, stalled))
    took, stalled = (fmean(column) for column in zip(*ranks, strict=True))
    found = Share(method, took / counted, counted * PAUSE / took, stalled / took)
    if dist.get_rank() == 0:
        print(found, flush=True)
    return found


@command(BENCH)
def app() -> Result:
    """Train under every method."""
    far = {"sites": SITES, "between": FAR}
    found: list[Share] = on_nodes(race, [*METHODS], sum(SITES), rate=NEAR, **far)  # type: ignore[arg-type]
    claims = [
        Claim(f"computing under {each.method}", f"at least {METHODS[each.method]:.1%}",
              f"{each.computing:.1%}", each.computing >= METHODS[each.method], GOAL)
        for each in found if METHODS[each.method]
    ]  # fmt: skip
    rows = [
        (each.method, f"{each.step:.2f} s", f"{each.computing:.1%}", f"{each.waiting:.1%}")
        for each in found
    ]
    title = "14 ranks on sites of 4, 4 and 6, 100 to 150 ms and 100 Mbit/s apart, a step of 1 s"
    return Result(title, ("method", "step", "computing", "waiting"), rows, claims, found)
