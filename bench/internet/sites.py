"""Rare, streaming and sparse exchanges keep fourteen ranks on three far sites computing."""

import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import offbeat
from bench.harness import GOAL, Bench, Result, command
from bench.harness.attached import attach
from bench.harness.bounds import at_least
from bench.harness.pause import paused
from bench.harness.ranks import on_nodes

SITES, NEAR = (4, 4, 6), "1gbit"
FAR = ["0-1:50ms@100mbit", "0-2:60ms@100mbit", "1-2:75ms@100mbit"]
PAUSE, WIDTH = 1.0, 224  # seconds of a step, which are the computing, and 1.6 MB
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
BENCH = Bench(
    name="internet/sites", minutes=8,
    claim="Rare, streaming and sparse exchanges keep three sites computing",
)  # fmt: skip


def race(methods: list[str]) -> list[dict[str, Any]]:
    """Train under every method, on every rank, whose nodes are the sites."""
    ranks = iter(range(sum(SITES)))
    world = offbeat.World.of([[next(ranks) for _ in range(size)] for size in SITES])
    return [share(method, world) for method in methods]


def share(method: str, world: offbeat.World) -> dict[str, Any]:
    """Seconds of a step in the mean over ranks, and the share that is computing.

    Of two rounds after the first one; of ``ddp`` few steps.
    """
    task, algorithm = paused(PAUSE, WIDTH), offbeat.algorithm(method)
    run = attach(algorithm, task.model, partial(torch.optim.SGD, lr=1e-3), mesh=world)
    every = max(4, getattr(algorithm.parameters, "every", 1))
    lead, counted = (2, 4) if method in ("ddp", "alone") else (every, 2 * every)
    for _ in range(lead):
        run.step(task.loss)
    began = time.perf_counter()
    for _ in range(counted):
        run.step(task.loss)
    took = torch.tensor((time.perf_counter() - began) / counted / world.size)
    run.finish()
    run.close()
    dist.all_reduce(took)
    found = {"method": method, "step": took.item(), "computing": PAUSE / took.item()}
    if dist.get_rank() == 0:
        print(found, flush=True)
    return found


@command(BENCH)
def app() -> Result:
    """Train under every method."""
    far = {"sites": SITES, "between": FAR}
    found = on_nodes(race, [*METHODS], sum(SITES), rate=NEAR, **far)
    rows = [(e["method"], f"{e['step']:.2f} s", f"{e['computing']:.1%}") for e in found]
    claims = [
        at_least(
            f"computing under {each['method']}", each["computing"], goal, "{:.1%}", source=GOAL
        )
        for each, goal in zip(found, METHODS.values(), strict=True)
        if goal
    ]
    title = "14 ranks on sites of 4, 4 and 6, 100 to 150 ms and 100 Mbit/s apart, a step of 1 s"
    return Result(title, ("method", "step", "computing"), rows, claims, found)
