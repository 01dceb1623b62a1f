"""A small regression on emulated nodes, one of which may be cut off or slow."""

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import offbeat
from bench.harness.environment import environment
from offbeat.lab import Fault, Lab

RATE = "250mbit"
WORK = 0.02  # seconds of CPU time that a step computes; a stopped process makes no progress


def train(algorithm: str, steps: int) -> None:
    """Train on every rank; each prints one line of JSON."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 8))
    teacher = torch.randn(64, 8) / 8
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    replica = offbeat.replicate(model, offbeat.algorithm(algorithm))
    torch.manual_seed(1 + rank)
    times = [time.monotonic()]
    for _ in range(steps):
        busy = time.process_time() + WORK
        x = torch.randn(32, 64)
        loss = (model(x) - x @ teacher).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        while time.process_time() < busy:
            pass
        replica.step()
        times.append(time.monotonic())
    replica.finish()
    print(json.dumps({"times": times, "lost": replica.stats()["lost"]}))
    replica.detach()
    dist.destroy_process_group()


def run(workers: int, *arguments: object, faults: Sequence[Fault]) -> dict[int, dict[str, Any]]:
    """Train on emulated nodes; returns what each rank printed."""
    lines: list[tuple[int | None, str]] = []
    command = [sys.executable, "-m", "bench.sgp.regression", json.dumps(arguments)]
    with Lab(workers, rate=RATE) as lab:
        code = lab.run(
            command,
            env=environment(),
            faults=faults,
            keep_going=True,
            on_line=lambda *line: lines.append(line),
        )
    if code != 0:
        raise RuntimeError(f"exit code {code}: {lines[-20:]}")
    return {rank: json.loads(line) for rank, line in lines if rank is not None and line[0] == "{"}


if __name__ == "__main__":
    train(*json.loads(sys.argv[1]))
