"""What a rank spends on an update with and without a partition: time, and memory at most."""

import time
from typing import Any

import torch
import torch.distributed as dist
from char_gpt import CHARACTERS, GPT, cross_entropy
from pytorch_optimizer import Lamb

import offbeat
from bench.harness.ranks import largest
from bench.harness.resident import forget_peak, resident, return_large_tensors

CONTEXT = 64
BATCHES = (4, 8, 16, 24)  # micro-batches
WARM_UP = 2  # updates that do not count


class Worker:
    """One rank's model under one algorithm, with LAMB; gradients are given."""

    def __init__(self, algorithm: str, width: int) -> None:
        torch.manual_seed(0)
        self.model = GPT(width, 4, 4, CONTEXT)
        self.replica = offbeat.replicate(self.model, offbeat.algorithm(algorithm))
        self.replica.set_requires_sync(False)
        self.owned = self.replica.owned_parameters()
        self.optimizer = Lamb(self.owned, lr=1e-3)
        self.seconds: dict[str, list[float]] = {"optimizer": [], "update": []}

    def update(self, step: int) -> None:
        """Time the optimizer and all of the update, on the slowest rank."""
        random = torch.Generator().manual_seed(10 * step + self.replica.world.node)
        owned = {id(p) for p in self.owned}
        for p in self.model.parameters():  # drawn for all: the same on the ranks of a node
            grad = torch.randn(p.shape, generator=random)
            p.grad = grad if id(p) in owned else None
        dist.barrier()
        started = time.perf_counter()
        self.optimizer.step()
        stepped = time.perf_counter()
        self.replica.step()
        for name, end in (("optimizer", stepped), ("update", time.perf_counter())):
            self.seconds[name].append(largest(end - started))

    def state_bytes(self) -> int:
        """Of the optimizer's moments, on the rank that has most."""
        states = [v for s in self.optimizer.state.values() for v in s.values()]
        return int(largest(sum(v.nbytes for v in states if isinstance(v, torch.Tensor))))


def measure(case: dict[str, Any]) -> dict[str, Any]:
    workers = {text: Worker(text, case["width"]) for text in case["algorithms"]}
    for step in range(WARM_UP + case["steps"]):
        for worker in workers.values():
            worker.update(step)
    models = [[*worker.model.parameters()] for worker in workers.values()]
    found = {
        "seconds": {
            text: {kind: times[WARM_UP:] for kind, times in worker.seconds.items()}
            for text, worker in workers.items()
        },
        "bytes": {text: worker.state_bytes() for text, worker in workers.items()},
        "apart": max((a - b).abs().max().item() for a, b in zip(*models, strict=True)),
        "parameters": sum(p.numel() for p in models[0]),
    }
    for worker in workers.values():
        worker.replica.detach()
    return found


def peaks(case: dict[str, Any]) -> dict[str, list[float]]:
    """Bytes at most under each algorithm with each micro-batch, on the rank that takes most."""
    return_large_tensors()
    found = {}
    for text in case["algorithms"]:
        peak(text, case["width"], BATCHES[0])  # what is loaded or compiled at the first use
        found[text] = [peak(text, case["width"], batch) for batch in BATCHES]
    return found


def peak(algorithm: str, width: int, batch: int) -> float:
    """Bytes at most in some steps of training, beside those before the model was made."""
    dist.barrier()
    forget_peak()
    before = resident("VmRSS")
    model = GPT(width, 4, 4, CONTEXT)
    replica = offbeat.replicate(model, offbeat.algorithm(algorithm))
    optimizer = torch.optim.Adam(replica.owned_parameters(), lr=1e-3)
    for _ in range(4):
        tokens = torch.randint(len(CHARACTERS), (batch, CONTEXT + 1))
        loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        model.zero_grad()
        replica.step()
    most = largest(resident("VmHWM") - before)
    replica.detach()
    return most
