"""A step of ``ddp()`` takes no longer than one of torch's DDP, on the CPU over Gloo."""

from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from char_gpt import CHARACTERS, GPT
from torch import nn
from torch.nn.functional import cross_entropy

from bench.harness import Bench, Claim, Result, command
from bench.harness.attached import TORCH, Task
from bench.harness.training import Times, Training, times

OURS = "ddp"
STEPS = {("conv", 2): 17, ("gpt", 2): 5, ("conv", 4): 3, ("gpt", 4): 2}  # of a turn of 0.2 s
HEADINGS = ("model", "workers", "torch DDP", "offbeat", "ratio", "95 %", "min - max")
BENCH = Bench(name="ddp/overhead", minutes=4, full_minutes=20)


def task(name: str) -> Task:
    """A small net for 28 x 28 images or a small GPT, and a batch of noise for each rank."""
    models = {
        "conv": nn.Sequential(
            nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10),
        ),
        "gpt": nn.Sequential(GPT(width=128, depth=2, heads=4, context=64), nn.Flatten(0, 1)),
    }  # fmt: skip
    torch.manual_seed(1 + dist.get_rank())
    tokens, following = torch.randint(len(CHARACTERS), (2, 8, 64))
    x, y = {
        "conv": (torch.randn(32, 1, 28, 28), torch.randint(10, (32,))),
        "gpt": (tokens, following.flatten()),
    }[name]
    return Task(models[name], lambda module, _: cross_entropy(module(x), y))


def ratios(ours: Times, theirs: Times) -> tuple[float, float, float]:
    """The ratio of the medians, and its 95 % bootstrap interval over pairs of rounds."""
    rounds = np.array([ours.paces, theirs.paces])
    draws = np.random.default_rng(0).integers(rounds.shape[1], size=(4000, rounds.shape[1]))
    a, b = np.median(rounds[:, draws], axis=2)
    low, high = np.quantile(a / b, (0.025, 0.975))
    return ours.step / theirs.step, float(low), float(high)


@command(BENCH, "--full", full={"rounds": 600})
def app(rounds: int = 120) -> Result:
    """Train copies of one model in the same processes, in turns; both models, 2 and 4 workers."""
    rows, claims, found = [], [], {}
    for (model, workers), steps in STEPS.items():
        sgd = partial(torch.optim.SGD, lr=0.01)
        turns = Training(partial(task, model), (TORCH, OURS), steps, rounds, lead=20, optimizer=sgd)
        each = found[f"{model}, {workers} workers"] = times(turns, 1, None, workers)
        ours, theirs = each[OURS], each[TORCH]
        ratio, low, high = ratios(ours, theirs)
        every = [a / b for a, b in zip(ours.paces, theirs.paces, strict=True)]
        rows.append((
            model, f"{workers}", f"{theirs.step * 1e3:.2f} ms", f"{ours.step * 1e3:.2f} ms",
            f"{ratio:.3f}", f"{low:.2f} - {high:.2f}", f"{min(every):.2f} - {max(every):.2f}",
        ))  # fmt: skip
        text = f"{model}, {workers} workers: a step takes no longer than with torch's DDP"
        said = f"{ratio:.3f} x ({low:.3f} - {high:.3f})"
        claims.append(Claim(text, "at most 1.00 x, within 95 %", said, low <= 1))
    title = f"Seconds per step of ddp() relative to torch's DDP, {rounds} rounds"
    return Result(title, HEADINGS, rows, claims, found)
