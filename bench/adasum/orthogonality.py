"""Updates become orthogonal; less so where the rate falls.

A residual network and a transformer, four virtual workers, SGD with momentum. The learning rate
falls to a tenth twice; the paper reports drops of orthogonality there.
"""

from functools import partial

import digits
import torch
from char_gpt import GPT
from torch import nn

import offbeat
from bench.harness import Bench, Claim, Result, command, text
from bench.harness.case import Case, Data, Task
from bench.harness.seeds import in_threads
from bench.lags.networks import Residual

WORKERS, BATCH, CONTEXT, POINTS = 4, 16, 64, 24
FALLS = (POINTS // 2, 3 * POINTS // 4)
MOMENTS = {"start": 0, "before 1st fall": FALLS[0] - 1, "after 1st fall": FALLS[0],
           "before 2nd fall": FALLS[1] - 1, "after 2nd fall": FALLS[1],
           "end": POINTS - 1}  # fmt: skip
BENCH = Bench(name="adasum/orthogonality", minutes=3, full_minutes=15, evidence="Fig. 2")


def resnet() -> nn.Module:
    """Three residual blocks on 28 x 28 images."""
    blocks = [nn.Sequential(Residual(16, 16, 1), nn.MaxPool2d(2)) for _ in range(2)]
    head = [Residual(16, 16, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)]
    return nn.Sequential(nn.Conv2d(1, 16, 3, stride=2), *blocks, *head)


def images() -> Data:
    return digits.generated(20000, seed=0), {}


SGD = partial(torch.optim.SGD, lr=0.0, momentum=0.9)
SMALL_GPT, WINDOWS = partial(GPT, 64, 2, 4, CONTEXT), partial(text.windows, CONTEXT)
TASKS = {  # and their rates
    Task("resnet", resnet, images, BATCH, optimizer=SGD): 0.05,
    Task("gpt", SMALL_GPT, WINDOWS, BATCH, text.score, text.loss, SGD): 0.1,
}


def falling(step: int, steps: int) -> float:
    return 0.1 ** sum(step >= steps * fall // POINTS for fall in FALLS)


def measured(replica: offbeat.Replica, _: int) -> dict[str, float]:
    return dict(replica.stats()["measures"])


def cell(point: dict[str, float]) -> str:
    """Mean, lowest and highest layer."""
    layers = [value for key, value in point.items() if key.startswith("orthogonality/")]
    return f"{point['orthogonality']:.2f} ({min(layers):.2f} - {max(layers):.2f})"


@command(BENCH, "--full", full={"steps": 2400})
def app(steps: int = 480) -> Result:
    rows, claims, width = [], [], steps // POINTS
    for task, rate in TASKS.items():
        case = Case("adasum", task, offbeat.adasum(), WORKERS, steps, rate, falling)
        seen = in_threads(case, after=measured).seen
        parts = [seen[i * width : (i + 1) * width] for i in range(POINTS)]
        curve = [
            {key: sum(m.get(key, 0.0) for m in part) / width for key in part[0]} for part in parts
        ]
        rows.append((task.name, *(cell(curve[moment]) for moment in MOMENTS.values())))
        mean = [point["orthogonality"] for point in curve]
        falls = [mean[fall] - mean[fall - 1] for fall in FALLS]
        claims += [
            Claim(f"{task.name}: orthogonality rises over training", "towards 1",
                  f"{mean[0]:.2f} to {mean[-1]:.2f}", mean[-1] > mean[0]),
            Claim(f"{task.name}: it drops where the learning rate falls", "drops",
                  ", ".join(f"{fall:+.2f}" for fall in falls), max(falls) < 0),
        ]  # fmt: skip
    title = f"Orthogonality of {WORKERS} workers' updates over {steps} steps, mean (layers)"
    return Result(title, ("model", *MOMENTS), rows, claims)
