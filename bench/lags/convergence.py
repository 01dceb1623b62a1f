"""Accuracy of dense SGD, SLGS and LAGS in equal epochs (Table 1, Figure 3 of the LAGS paper).

Two convolutional nets on digits, virtual workers; :mod:`bench.lags.language` has the LSTM. The
paper's nets take about 14,000 steps at density 0.001; here density is higher in the ratio in which
steps are fewer.
"""

from functools import partial

from torch import nn

import offbeat
from bench.harness import GOAL, Bench, Claim, Result, command
from bench.harness.case import Task
from bench.lags.networks import resnet
from bench.lags.runs import DENSE, LAGS, SLGS, Runs, measure
from bench.lags.training import MOMENTUM, Learnt, accuracy, digits

TRICKS = "LAGS, warm-up, momentum correction"
BENCH = Bench(
    name="lags/convergence",
    claim="LAGS comes near dense SGD (Table 1, Fig. 3)",
    minutes=7,
    full_minutes=110,
    evidence={"Table 1, Fig. 3": "As accurate as dense SGD"},  # with lags/language
)


def vgg(width: int = 16) -> nn.Module:
    layers: list[nn.Module] = []
    for into, out in ((1, width), (width, 2 * width), (2 * width, 4 * width)):
        layers += [nn.Conv2d(into, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(),
                   nn.MaxPool2d(2)]  # fmt: skip
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * width, 64), nn.ReLU(),
                         nn.Linear(64, 10))  # fmt: skip


TASKS = (
    Learnt(Task("ResNet", partial(resnet, 8, 1), digits, 16, accuracy), 0.05,
           (0.9092, 0.9024, 0.8985)),
    Learnt(Task("VGG", vgg, digits, 16, accuracy), 0.05, (0.9278, 0.9227, 0.9255)),
)  # fmt: skip


def methods(steps: int) -> dict[str, offbeat.Algorithm]:
    """The three, and LAGS with the techniques that the paper names and did not measure."""
    density, warm = min(0.25, 14 / steps), max(1, steps // 10)
    return {
        DENSE: offbeat.ddp(),
        SLGS: offbeat.slgs(density),
        LAGS: offbeat.lags(density),
        TRICKS: offbeat.lags(density, warmup=warm, momentum=MOMENTUM),
    }


def claims(runs: Runs) -> list[Claim]:
    """Table 1 and Figure 3; what the tricks do is supposed in the paper, not measured."""
    return [
        runs.near(LAGS),
        runs.near(SLGS),
        runs.near(LAGS, SLGS),
        runs.near(TRICKS, paper="could resolve the loss", source=GOAL),
    ]


@command(BENCH, "--seeds 1", "--full", full="Four times the steps, 16 workers.")
def app(full: bool = False, steps: int = 400, workers: int = 4, seeds: int = 3) -> Result:
    """Train two kinds of models under four methods."""
    steps, workers = (4 * steps, 16) if full else (steps, workers)
    algorithms = methods(steps)
    found = [measure(task, algorithms, steps, workers, seeds) for task in TASKS]
    lines = [
        (runs.learnt.task.name, *(runs.end(name, 4) for name in algorithms), str(runs.learnt.paper))
        for runs in found
    ]
    return Result(
        f"held-out accuracy, {workers} workers, {steps} steps, seeds: {seeds}",
        ("model", *algorithms, "paper: dense, SLGS, LAGS"),
        lines,
        [claim for runs in found for claim in claims(runs)],
        {runs.learnt.task.name: runs.ends for runs in found},
    )
