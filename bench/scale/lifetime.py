"""The life of one rank, from attach to detach: seconds, and what it holds meanwhile."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import SGD

import offbeat

PHASES = ("attach", "first step", "finish", "detach")
WAIT = 300.0  # seconds for one run


@dataclass
class Sample:
    """What one rank has measured: seconds by phase, and what it holds more while attached."""

    seconds: dict[str, float] = field(default_factory=dict)
    sockets: float = 0.0
    threads: float = 0.0

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds[phase] = time.perf_counter() - begin


def sockets() -> set[str]:
    """Return the sockets of this process, by the numbers of the kernel."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            found.add(os.readlink(entry))
    return {name for name in found if name.startswith("socket")}


def threads() -> int:
    """Return the number of threads of this process, those of Gloo among them."""
    return len(os.listdir("/proc/self/task"))


def run_rank(method: str, mesh: Any, meet: Callable[[], Any], sharing: int) -> Sample:
    """Attach, step, finish and detach; ``sharing`` ranks live in this process, and ``meet``."""
    torch.manual_seed(0)
    model, sample = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)), Sample()
    optimizer = SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()  # which imports a second's worth of torch at first
    optimizer.zero_grad()
    meet()
    before, idle = sockets(), threads()
    meet()
    with sample.timed("attach"):
        replica = offbeat.replicate(model, offbeat.algorithm(method), mesh=mesh)
    meet()
    sample.sockets = len(sockets() - before) / sharing
    sample.threads = (threads() - idle) / sharing
    meet()
    with sample.timed("first step"):
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        replica.step()
    meet()
    with sample.timed("finish"):
        replica.finish()
    meet()
    with sample.timed("detach"):
        replica.detach()
    meet()
    return sample
