"""Converges at 8 times the batch, where an all-reduce does not.

LeNet-5 on 8,000 real digits, four nodes. A rank's batch is 16 images, or eight times that. The
learning rate is multiplied by the micro-batches of a step, and with an all-reduce by the number of
ranks too, as in the paper; nothing is tuned for the large batch.
"""

import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import offbeat
from bench.adasum.mnist import lenet, real, real_or_exit
from bench.harness import Bench, Claim, Effect, Result, command
from bench.harness.case import accuracy
from bench.harness.ranks import on_nodes

NODES, BATCH = 4, 16
METHODS = [(method, times) for times in (1, 8) for method in ("ddp", "adasum")]
BENCH = Bench(name="adasum/epochs", minutes=3, evidence="Table 4, Fig. 3")


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


@command(
    BENCH, "--lr 0.005", lr="Of one rank's batch of 16.", target="Accuracy on held-out digits, %.",
    epochs="After which a run ends without reaching it.",
)  # fmt: skip
def app(lr: float = 0.01, target: float = 96.0, epochs: int = 20, rate: str = "250mbit") -> Result:
    real_or_exit(BENCH)  # fetched before the ranks read it: their nodes have no way out
    runs = [Run(*each, lr, target, epochs) for each in METHODS]
    found: list[Run] = on_nodes(train_all, runs, NODES, rate=rate)
    small, small_adasum, large, adasum = found
    took = small.took, small_adasum.took
    near = None not in took and abs(took[0] - took[1]) <= 1
    sooner = small_adasum.seconds / adasum.seconds if adasum.took else 0.0
    claims = [
        Claim("small batch: both need about the same number of epochs", "62 and 62",
              " and ".join(f"{each or 'never'}" for each in took), near),
        Claim("8 x the batch: all-reduce does not reach the target", "never in 120",
              f"{large.took or 'never'}", large.took is None),
        Claim("8 x the batch: Adasum reaches it", "69, for 62 with the small one",
              f"{adasum.took or 'never'}", adasum.took is not None),
        Claim.effect("Adasum reaches it sooner with the large batch", Effect(2.3, "x"),
                     Effect(sooner, "x")),
    ]  # fmt: skip
    headings = ("method", "batch", f"epochs to {target:.1f}%", "an epoch", "time", "best")
    title = f"LeNet-5 on {NODES} nodes, {rate}"
    return Result(title, headings, [run.row for run in found], claims, raw=found)
