"""Sparse gradients of an embedding behind slow links: `ddp()` beside torch's DDP, and dense ones.

A table of 200,000 rows of 32 entries, of which each rank reads 1 % in a step, and a small network.
"""

from functools import partial
from math import inf

import torch
from torch import Tensor, nn
from torch.optim import SGD

from bench.harness import Bench, Claim, Result, attached, command
from bench.harness.attached import TORCH, Attached, Build, Task
from bench.harness.training import Found, Training, times

ROWS, WIDTH, READ = 200_000, 32, 2_000  # of a step and rank
DENSE, OURS = "ddp, sparse=False", "ddp"
BENCH = Bench(
    name="ddp/sparse",
    claim="Sparse gradients are sent as rows, as fast as by torch's DDP",
    minutes=2,
)


def model(*, sparse: bool) -> nn.Module:
    """An embedding whose bags a small network scores."""
    torch.manual_seed(0)
    bag = nn.EmbeddingBag(ROWS, WIDTH, mode="mean", sparse=sparse)
    return nn.Sequential(bag, nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 1))


def loss(module: nn.Module, random: torch.Generator) -> Tensor:
    """On bags of ten rows that a generator draws."""
    return module(torch.randint(ROWS, (READ // 10, 10), generator=random)).square().mean()


def task() -> Task:
    """The model with sparse gradients."""
    return Task(model(sparse=True), loss)


def attach(method: str, made: nn.Module, build: Build) -> Attached:
    """The method on the model, or with dense gradients."""
    if method == DENSE:
        return attached.attach(OURS, model(sparse=False), build)
    return attached.attach(method, made, build)


def rows(found: Found) -> list[tuple[str, ...]]:
    """One line for each method."""
    return [
        (name, f"{each.step * 1e3:.1f} ms", f"{each.over(found[TORCH]):.2f}", _sent(each.bytes))
        for name, each in found.items()
    ]


def _sent(count: float) -> str:
    return "" if count != count else f"{count / 1e6:.2f} MB"


def claims(found: Found) -> list[Claim]:
    """On bytes and time."""
    fewer = found[DENSE].bytes / found[OURS].bytes
    over = found[OURS].over(found[TORCH])
    return [
        Claim("rows of 1 % are a twentieth of the dense bytes", "20 x fewer",
              f"{fewer:.0f} x fewer", fewer >= 20),
        Claim("a step takes no longer than with torch's DDP", "at most 1.00 x", f"{over:.2f} x",
              over <= 1.0),
    ]  # fmt: skip


@command(BENCH)
def app(nodes: int = 4, rate: str = "250mbit", rounds: int = 15) -> Result:
    """Time both, and dense gradients, in turns of five steps."""
    methods = (TORCH, OURS, DENSE)
    training = Training(
        task, methods, 5, rounds, inf, optimizer=partial(SGD, lr=0.01), attach=attach
    )
    found = times(training, nodes, rate)
    headings = ("method", "a step", "x torch DDP", "sent a step")
    title = f"An embedding of {ROWS:,} rows, 1 % touched, {nodes} nodes, {rate}"
    return Result(title, headings, rows(found), claims(found), found)
