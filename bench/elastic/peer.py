"""A worker of torchft: a replica group of one rank, with a manager of its own."""

import os
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore
from torchft.coordination import LighthouseServer
from torchft.ddp import DistributedDataParallel
from torchft.local_sgd import DiLoCo
from torchft.manager import Manager
from torchft.optim import OptimizerWrapper
from torchft.process_group import ProcessGroupGloo

from bench.elastic.worker import Learner, Log

PATIENCE = 5.0  # seconds of torchft's own examples for a collective, beside a step

JOIN = 10_000  # ms for which a quorum waits for those that live, as in torchft's instructions


def host(where: Connection) -> None:
    """Host the lighthouse in a process of its own, and send its address."""
    _hush()
    server = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=JOIN)
    where.send(server.address())
    while True:
        time.sleep(60)


def work(lighthouse: str, rank: int, text: str, every: int, pause: float, path: Path) -> None:
    """Train until killed."""
    log = Log(path)
    log("ready")
    torch.set_num_threads(1)
    _hush()
    learner = Learner(pause, os.getpid())
    model, optimizer = learner.model, torch.optim.AdamW(learner.model.parameters(), lr=1e-3)
    healed: list[bool] = []

    def load(state: dict[str, Any]) -> None:
        healed.append(True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    is_ddp = text == "torchft DDP"
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        ProcessGroupGloo(timeout=timedelta(seconds=PATIENCE + pause)), load, state, 1,
        use_async_quorum=is_ddp, rank=0, world_size=1, store_addr="127.0.0.1",
        store_port=store.port, lighthouse_addr=lighthouse, replica_id=f"worker{rank}",
        hostname="127.0.0.1", timeout=timedelta(seconds=30),
    )  # fmt: skip
    log("in", 0)
    if is_ddp:
        parts: Any = DistributedDataParallel(manager, model), OptimizerWrapper(manager, optimizer)
        _train(log, learner, *parts, manager, healed, 1)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    with DiLoCo(manager, [model], optimizer, outer, every):
        _train(log, learner, model, optimizer, manager, healed, every)


def _train(
    log: Log, learner: Learner, module: Any, optimizer: Any, manager: Manager, healed: list[bool],
    every: int,
) -> None:  # fmt: skip
    """Log each step, and whether those of an exchange count.

    Those of a rank that was healed in it do not: its gradients are zeroed, its model is replaced.
    """
    step = 0
    while True:
        log("begin", step)
        before = manager.current_step()
        optimizer.zero_grad()
        learner.loss(module).backward()
        optimizer.step()
        log("end", step)
        step += 1
        if step % every == 0:
            is_committed = bool(manager.current_step() > before)
            log("commit" if is_committed and not healed else "drop")
            healed.clear()


def _hush() -> None:
    """Discard what is written to standard error: torchft logs several lines a step."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
