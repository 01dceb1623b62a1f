"""A worker that may be killed at any time: what it does stands in a file, which survives it."""

import json
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import torch._dynamo  # the first step of an optimizer would import it
from torch import Tensor, nn
from torch.distributed import TCPStore

import offbeat
import offbeat.names  # all public ones, which would be imported at their first use
from bench.elastic.score import DETECTION, JOINING, OTHER, recordings
from offbeat.kernels.dispatch import load_kernels

WIDTH = 128


class Log:
    """Writes events with their times, by the clock that all processes of a machine share."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)

    def __call__(self, kind: str, *said: object) -> None:
        """Write one line of JSON at once."""
        os.write(self._file, f"{json.dumps([kind, time.monotonic(), *said])}\n".encode())


class Learner:
    """A small net that learns from a fixed one; a step takes ``pause`` seconds more."""

    def __init__(self, pause: float, seed: int) -> None:
        self.pause, self.random = pause, torch.Generator().manual_seed(seed)
        torch.manual_seed(0)
        self.teacher, self.model = (
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
            for _ in range(2)
        )

    def loss(self, module: Callable[[Tensor], Tensor]) -> Tensor:
        """On new data, after a pause as on an accelerator of the worker's own."""
        time.sleep(self.pause)
        return self.error(module, torch.randn(64, WIDTH, generator=self.random))

    def heldout(self) -> float:
        """The loss on data that are the same for all workers."""
        x = torch.randn(4096, WIDTH, generator=torch.Generator().manual_seed(0))
        return self.error(self.model, x).item()

    def error(self, module: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return (module(x) - self.teacher(x).detach()).square().mean()


load_kernels(torch.device("cpu"))  # once, in the process that workers are forked from


def work(address: str, size: int, rank: int, text: str, pause: float, path: Path) -> None:
    """Train as one worker of the recipe ``text``, until the store names the last step."""
    log = Log(path)
    os.environ["OFFBEAT_TELEMETRY"] = str(recordings(path))
    log("ready")  # the process was forked from one that has imported all
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    host, _, port = address.partition(":")
    learner, store = Learner(pause, os.getpid()), TCPStore(host, int(port), is_master=False)
    optimizer = torch.optim.AdamW(learner.model.parameters(), lr=1e-3)
    world = offbeat.World.at(address, size=size, rank=rank)
    given: dict[str, Any] = {"mesh": world, "optimizer": optimizer, "elastic": True}
    replica = offbeat.replicate(learner.model, offbeat.algorithm(text), **given)
    log("in")
    last: int | None = None
    while last is None or replica.steps < last:
        known, members = len(replica.lost), len(replica.joined)
        optimizer.zero_grad()
        learner.loss(learner.model).backward()
        optimizer.step()
        replica.step()
        part = JOINING if len(replica.joined) > members else OTHER
        log("end", replica.steps - 1, DETECTION if len(replica.lost) > known else part)
        for loss in replica.lost[known:]:
            log("lost", loss.get("rank", loss.get("node")), loss["used"])
        if last is None and store.check(["last"]):  # once: the store may be far away
            last = int(store.get("last"))
    replica.finish()
    digest = crc32(b"".join(p.detach().numpy().tobytes() for p in learner.model.parameters()))
    log("out", digest, learner.heldout(), replica.steps)
    replica.detach()
