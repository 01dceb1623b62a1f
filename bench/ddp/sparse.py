"""Sparse gradients of an embedding are sent as rows, as fast as by torch's DDP."""

from functools import partial
from math import inf

import torch
from torch import Tensor, nn
from torch.optim import SGD

from bench.harness import Bench, Claim, Result, at_most, attached, command
from bench.harness.attached import TORCH, Attached, Build, Task
from bench.harness.training import Training, times

ROWS, WIDTH, READ = 200_000, 32, 2_000  # of a step and rank
DENSE, OURS = "ddp, sparse=False", "ddp"
HEADINGS = ("method", "a step", "x torch DDP", "sent a step")
BENCH = Bench(name="ddp/sparse", minutes=2)


def model(*, sparse: bool) -> nn.Module:
    """An embedding whose bags a small network scores."""
    torch.manual_seed(0)
    bag = nn.EmbeddingBag(ROWS, WIDTH, mode="mean", sparse=sparse)
    return nn.Sequential(bag, nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 1))


def loss(module: nn.Module, random: torch.Generator) -> Tensor:
    """On bags of ten rows that a generator draws."""
    return module(torch.randint(ROWS, (READ // 10, 10), generator=random)).square().mean()


def task() -> Task:
    return Task(model(sparse=True), loss)


def attach(method: str, made: nn.Module, build: Build) -> Attached:
    if method == DENSE:
        return attached.attach(OURS, model(sparse=False), build)
    return attached.attach(method, made, build)


@command(BENCH)
def app(nodes: int = 4, rate: str = "250mbit", rounds: int = 15) -> Result:
    """Time both, and dense gradients, in turns of five steps."""
    methods, sgd = (TORCH, OURS, DENSE), partial(SGD, lr=0.01)
    training = Training(task, methods, 5, rounds, inf, optimizer=sgd, attach=attach)
    found = times(training, nodes, rate)
    rows = []
    for name, each in found.items():
        sent = "" if name == TORCH else f"{each.bytes / 1e6:.2f} MB"
        rows.append((name, f"{each.step * 1e3:.1f} ms", f"{each.over(found[TORCH]):.2f}", sent))
    fewer = found[DENSE].bytes / found[OURS].bytes
    over = found[OURS].over(found[TORCH])
    claims = [
        Claim("rows of 1 % are a twentieth of the dense bytes", "20 x fewer",
              f"{fewer:.0f} x fewer", fewer >= 20),
        at_most("a step takes no longer than with torch's DDP", over, 1.0),
    ]  # fmt: skip
    title = f"An embedding of {ROWS:,} rows, 1 % touched, {nodes} nodes, {rate}"
    return Result(title, HEADINGS, rows, claims, found)
