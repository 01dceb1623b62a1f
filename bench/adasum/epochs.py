"""Converges at 8 times the batch, where an all-reduce does not.

LeNet-5 on 8,000 real digits, four nodes. A rank's batch is 16 images, or eight times that. The
learning rate is multiplied by the micro-batches of a step, and with an all-reduce by the number of
ranks too, as in the paper; nothing is tuned for the large batch.
"""

import time

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import offbeat
from bench.adasum.mnist import lenet, real, real_or_exit
from bench.harness import Bench, Claim, Effect, Result, command
from bench.harness.case import accuracy
from bench.harness.ranks import on_nodes

NODES, BATCH = 4, 16
RUNS = [(method, times) for times in (1, 8) for method in ("ddp", "adasum")]
BENCH = Bench(name="adasum/epochs", minutes=3, evidence="Table 4, Fig. 3")
Run = tuple[list[float], float]  # accuracy in % after each epoch, and seconds without evaluations


def train_all(settings: tuple[float, float, int]) -> list[Run]:
    return [train(*run, *settings) for run in RUNS]


def train(method: str, times: int, lr: float, target: float, epochs: int) -> Run:
    """Until the target accuracy, or for so many epochs; on every rank."""
    (images, labels), scored = real()
    torch.manual_seed(0)
    model = lenet()
    replica = offbeat.replicate(model, offbeat.algorithm(method))
    scale = times * (NODES if method == "ddp" else 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr * scale, momentum=0.9)
    scores, seconds = [], 0.0
    for epoch in range(epochs):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        dist.barrier()
        started = time.perf_counter()
        for batch in order.split(NODES * BATCH * times):
            mine = batch.chunk(NODES)[dist.get_rank()]
            cross_entropy(model(images[mine]), labels[mine]).backward()
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
        dist.barrier()
        seconds += time.perf_counter() - started
        scores.append(accuracy(model, *scored["heldout"]))
        if scores[-1] >= target or not all(p.isfinite().all() for p in model.parameters()):
            break
    replica.detach()
    return scores, seconds


@command(
    BENCH, "--lr 0.005", lr="Of one rank's batch of 16.", target="Accuracy on held-out digits, %.",
    epochs="After which a run ends without reaching it.",
)  # fmt: skip
def app(lr: float = 0.01, target: float = 96.0, epochs: int = 20, rate: str = "250mbit") -> Result:
    real_or_exit(BENCH)  # fetched before the ranks read it: their nodes have no way out
    found: list[Run] = on_nodes(train_all, (lr, target, epochs), NODES, rate=rate)
    rows, took = [], []
    for (method, times), (scores, seconds) in zip(RUNS, found, strict=True):
        count, is_reached = len(scores), scores[-1] >= target
        took.append(count if is_reached else None)
        rows.append((
            method, f"{NODES * BATCH * times}", f"{count}" if is_reached else f"never in {count}",
            f"{seconds / count:.2f} s", f"{seconds:.1f} s" if is_reached else "-",
            f"{max(scores):.2f}%",
        ))  # fmt: skip
    small, small_adasum, large, adasum = took
    near = bool(small and small_adasum) and abs(small - small_adasum) <= 1
    sooner = found[1][1] / found[3][1] if adasum else 0.0
    claims = [
        Claim("small batch: both need about the same number of epochs", "62 and 62",
              f"{small or 'never'} and {small_adasum or 'never'}", near),
        Claim("8 x the batch: all-reduce does not reach the target", "never in 120",
              f"{large or 'never'}", large is None),
        Claim("8 x the batch: Adasum reaches it", "69, for 62 with the small one",
              f"{adasum or 'never'}", adasum is not None),
        Claim.effect("Adasum reaches it sooner with the large batch", Effect(2.3, "x"),
                     Effect(sooner, "x")),
    ]  # fmt: skip
    headings = ("method", "batch", f"epochs to {target:.1f}%", "an epoch", "time", "best")
    return Result(f"LeNet-5 on {NODES} nodes, {rate}", headings, rows, claims)
