"""The task of SGP benches that need more than rows of one tensor: a net on scanned digits."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from torch import nn
from torch.nn.functional import avg_pool2d

import offbeat
from bench.harness.case import Case, Data, Pause, Task
from bench.harness.seeds import in_lab

BATCH = 16
LINK = "25mbit"  # of a node: the model takes 0.144 s
Times = dict[str, float]  # seconds of a step, by method


@cache
def data() -> Data:
    """scikit-learn's digits as rows of 14 x 14 pixels, to train on and held out."""
    from digits import small  # imported late: it takes seconds

    train, heldout = ((avg_pool2d(images, 2).flatten(1), labels) for images, labels in small())
    return train, {"train": train, "heldout": heldout}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(196, 512), nn.ReLU(), nn.Linear(512, 10))


DIGITS = Task("digits", net, data, BATCH)


def digits_case(
    name: str, algorithm: offbeat.Algorithm, workers: int, steps: int, pause: Pause | None = None
) -> Case:
    """At the paper's rate: 0.1 for 256 images in a step."""
    rate = 0.1 * workers * BATCH / 256
    return Case(name, DIGITS, algorithm, workers, steps, rate, pause=pause)


def times(
    methods: Mapping[str, offbeat.Algorithm],
    nodes: int,
    steps: int,
    pause: Pause | None = None,
    rate: str = LINK,
    runs: int = 1,
) -> list[Times]:
    """Seconds of a step of each method on emulated nodes with one process each, in each run."""
    cases = [
        replace(digits_case(name, method, nodes, steps, pause), seed=run)
        for run in range(runs)
        for name, method in methods.items()
    ]
    seconds = iter([outcome.seconds for outcome in in_lab(cases, rate)])
    return [{name: next(seconds) for name in methods} for _ in range(runs)]
