"""A worker of torchft: a replica group of one rank, with a manager of its own."""

import os
import time
from contextlib import nullcontext
from datetime import timedelta
from itertools import count
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

from bench.elastic.score import OTHER
from bench.elastic.worker import Learner, Log

INTERVAL = 4  # steps of DiLoCo
PATIENCE = 5.0  # seconds of torchft's own examples for a collective, beside a step
JOIN = 10_000  # ms for which a quorum waits for those that live, as in torchft's instructions


def host(where: Connection) -> None:
    """Host the lighthouse in a process of its own, and send its address."""
    hush()
    server = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=JOIN)
    where.send(server.address())
    while True:
        time.sleep(60)


def work(lighthouse: str, rank: int, text: str, pause: float, path: Path) -> None:
    """Train until killed; log each step, and whether those of an exchange count.

    Those of a rank that was healed in it do not: its gradients are zeroed, its model is replaced.
    """
    log = Log(path)
    log("ready")
    torch.set_num_threads(1)
    hush()
    learner, healed = Learner(pause, os.getpid()), list[bool]()
    module, optimizer = learner.model, torch.optim.AdamW(learner.model.parameters(), lr=1e-3)
    parts: dict[str, Any] = {"model": module, "optimizer": optimizer}

    def load(state: dict[str, Any]) -> None:
        healed.append(True)
        for name, part in parts.items():
            part.load_state_dict(state[name])

    def state() -> dict[str, Any]:
        return {name: part.state_dict() for name, part in parts.items()}

    is_ddp = text == "torchft DDP"
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        ProcessGroupGloo(timeout=timedelta(seconds=PATIENCE + pause)), load, state, 1,
        use_async_quorum=is_ddp, rank=0, world_size=1, store_addr="127.0.0.1",
        store_port=store.port, lighthouse_addr=lighthouse, replica_id=f"worker{rank}",
        hostname="127.0.0.1", timeout=timedelta(seconds=30),
    )  # fmt: skip
    log("in")
    outer = torch.optim.SGD(module.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    if is_ddp:
        module, optimizer = (
            DistributedDataParallel(manager, module), OptimizerWrapper(manager, optimizer)
        )  # fmt: skip
    with nullcontext() if is_ddp else DiLoCo(manager, [module], optimizer, outer, INTERVAL):
        for step in count():
            before = manager.current_step()
            optimizer.zero_grad()
            learner.loss(module).backward()
            optimizer.step()
            log("end", step, OTHER)
            if is_ddp or step % INTERVAL == INTERVAL - 1:
                is_committed = manager.current_step() > before and not healed
                log("commit" if is_committed else "drop")
                healed.clear()


def hush() -> None:
    """Discard what is written to standard error: torchft logs several lines a step."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
