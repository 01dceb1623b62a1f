"""One connection between two nodes against eight: whole runs, far away and on a local network."""

import os
import time
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from bench.harness import GOAL, Bench, Claim, Result, command
from bench.harness.attached import attach
from bench.harness.pause import paused
from bench.harness.ranks import on_nodes
from offbeat.lab.network.links import LinkOptions
from offbeat.transport.links import CONNECTIONS

WIDE, GAIN, KEPT = 8, 4.0, 0.95
PAUSE, WIDTH = 0.05, 448  # seconds of a step, and 6.4 MB
METHODS = {  # an all-reduce, gossip and an outer exchange in every step or every second one
    "ddp(bucket_mb=100)": 4,
    "sgp": 4,
    "diloco(every=2)": 4,
}
FAR: tuple[str, LinkOptions] = "250mbit", {"latency": "50ms", "loss": "0.1%"}
NEAR: tuple[str, LinkOptions] = "250mbit", {}
BENCH = Bench(
    name="internet/width",
    claim="Eight connections carry four times what one does where packets are lost, and no less "
    "on a local network",
    minutes=8,
)


@dataclass(frozen=True)
class Run:
    """The seconds of the steps of a run."""

    network: str
    method: str
    connections: int
    seconds: float


def race(network: str) -> list[Run]:
    """Train under every method with one connection and with eight, on every rank."""
    return [train(network, method, count) for method in METHODS for count in (1, WIDE)]


def train(network: str, method: str, count: int) -> Run:
    """Count the steps after the first exchange."""
    os.environ[CONNECTIONS] = str(count)
    task, steps = paused(PAUSE, WIDTH), METHODS[method] * (1 if network == "far" else 5)
    run = attach(method, task.model, partial(torch.optim.SGD, lr=1e-4))
    for _ in range(2):
        run.step(task.loss)
    dist.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        run.step(task.loss)
    dist.barrier()
    found = Run(network, method, count, (time.perf_counter() - began) / steps)
    run.finish()
    run.close()
    if dist.get_rank() == 0:
        print(found, flush=True)
    return found


@command(BENCH)
def app() -> Result:
    """Train between two nodes on both networks."""
    runs: list[Run] = []
    for name, (rate, far) in {"far": FAR, "near": NEAR}.items():
        runs += on_nodes(race, name, 2, 1, rate, **far)
    rows, claims = [], []
    for network, goal in (("far", GAIN), ("near", KEPT)):
        gains = {}
        for method in METHODS:
            one, wide = (r for r in runs if (r.network, r.method) == (network, method))
            sending = [run.seconds - PAUSE for run in (one, wide)]
            gains[method] = sending[0] / sending[1]
            rows.append((network, method, f"{one.seconds:.2f} s", f"{wide.seconds:.2f} s",
                         f"{gains[method]:.2f}"))  # fmt: skip
        least = min(gains, key=lambda method: gains[method])
        claims.append(
            Claim(f"time beside computing, 1 connection over {WIDE}, {network}",
                  f"at least {goal:g}", f"{gains[least]:.2f} ({least})", gains[least] >= goal, GOAL)
        )  # fmt: skip
    title = "Two nodes, 250 Mbit/s, 6.4 MB; far: 100 ms there and back, 0.1 % loss"
    headings = ("network", "method", "1 connection", f"{WIDE} connections", "times faster")
    return Result(title, headings, rows, claims, runs)
