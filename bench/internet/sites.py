"""Rare, streaming and sparse exchanges keep fourteen ranks on three far sites computing."""

import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import offbeat
from bench.harness import GOAL, Bench, Result, at_least, command
from bench.harness.attached import ALONE, Task, attach
from bench.harness.gpt import gpt
from bench.harness.pause import pausing
from bench.harness.ranks import on_nodes

SITES, NEAR = (4, 4, 6), "1gbit"
FAR = ["0-1:50ms@100mbit", "0-2:60ms@100mbit", "1-2:75ms@100mbit"]
# A GPT of 1.6 MB. Its step pauses beside what it computes: fourteen share two cores.
PAUSE, SIZES = 0.9, {"width": 88, "depth": 4, "context": 32, "batch": 1}
METHODS = {  # and the goal of each
    ALONE: 0.0,
    "ddp": 0.0,
    "sgp(overlap=4,within='local')": 0.0,
    "diloco(every=10)": 0.0,
    "diloco(every=10,within='local')": 0.83,
    "diloco(every=10,fragments=2,delay=3,wire='int8',within='local')": 0.95,
    "sparse_loco(every=10,within='local')": 0.0,
    "sparse_loco(every=20,within='local')": 0.95,
}
BENCH = Bench(name="internet/sites", minutes=8)


def race(methods: list[str]) -> list[dict[str, Any]]:
    """Train under every method, on every rank, whose nodes are the sites."""
    ranks = iter(range(sum(SITES)))
    world, task = offbeat.World.of([[next(ranks) for _ in range(n)] for n in SITES]), gpt(**SIZES)
    pausing(task.model.layers, PAUSE)  # type: ignore[arg-type]
    seconds = {method: step(method, task, world) for method in methods}
    return [
        {"method": method, "step": each, "computing": seconds[ALONE] / each}
        for method, each in seconds.items()
    ]


def step(method: str, task: Task, world: offbeat.World) -> float:
    """Seconds of a step in the mean over ranks: of two rounds after the first one, or of few."""
    algorithm = offbeat.algorithm(method)
    run = attach(algorithm, task.model, partial(torch.optim.SGD, lr=1e-3), mesh=world)
    every = max(4, getattr(algorithm.parameters, "every", 1))
    lead, counted = (2, 8) if method in ("ddp", ALONE) else (every, 2 * every)
    for _ in range(lead):
        run.step(task.loss)
    began = time.perf_counter()
    for _ in range(counted):
        run.step(task.loss)
    took = torch.tensor((time.perf_counter() - began) / counted / world.size)
    run.finish()
    run.close()
    dist.all_reduce(took)
    return took.item()


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
    title = "14 ranks on sites of 4, 4 and 6, 100 to 150 ms and 100 Mbit/s apart"
    return Result(title, ("method", "step", "computing"), rows, claims, found)
