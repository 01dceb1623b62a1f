"""Training LeNet-5 on emulated nodes until it reaches a target accuracy."""

import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import offbeat
from bench.adasum.mnist import lenet, real
from bench.harness.case import accuracy

NODES, BATCH = 4, 16


@dataclass
class Run:
    """Training until the target accuracy in %, or for so many epochs."""

    method: str
    times: int  # batches of 16 images
    lr: float  # of one such batch
    target: float
    epochs: int
    accuracy: list[float] = field(default_factory=list)  # after each epoch
    seconds: float = 0.0

    @property
    def took(self) -> int | None:
        """Epochs to the target."""
        return len(self.accuracy) if self.accuracy[-1] >= self.target else None

    @property
    def row(self) -> tuple[str, ...]:
        batch, epochs = NODES * BATCH * self.times, len(self.accuracy)
        reached = f"{epochs}" if self.took else f"never in {epochs}"
        spent = f"{self.seconds:.1f} s" if self.took else "-"
        epoch = f"{self.seconds / epochs:.2f} s"
        return self.method, f"{batch}", reached, epoch, spent, f"{max(self.accuracy):.2f}%"


def train_all(runs: list[Run]) -> list[Run]:
    """Train with each method and batch, on every rank."""
    for run in runs:
        train(run)
        if dist.get_rank() == 0:
            print(*run.row, flush=True)
    return runs


def train(run: Run) -> None:
    """Evaluations take no part of the time."""
    (images, labels), scored = real()
    torch.manual_seed(0)
    model = lenet()
    replica = offbeat.replicate(model, offbeat.algorithm(run.method))
    scale = run.times * (NODES if run.method == "ddp" else 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=run.lr * scale, momentum=0.9)
    for epoch in range(run.epochs):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        dist.barrier()
        started = time.perf_counter()
        for batch in order.split(NODES * BATCH * run.times):
            mine = batch.chunk(NODES)[dist.get_rank()]
            cross_entropy(model(images[mine]), labels[mine]).backward()
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
        dist.barrier()
        run.seconds += time.perf_counter() - started
        run.accuracy.append(accuracy(model, *scored["heldout"]))
        if run.took or not all(p.isfinite().all() for p in model.parameters()):
            break
    replica.detach()
