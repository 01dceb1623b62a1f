"""The runs of SGP benches that need more than rows of one tensor: a net on scanned digits."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from torch import nn
from torch.nn.functional import avg_pool2d

import offbeat
from bench.harness.case import Case, Data, Outcome, Pause, Task
from bench.harness.seeds import in_lab

LINK = "25mbit"  # of a node: the model takes 0.144 s
Methods = Mapping[str, offbeat.Algorithm]


@cache
def data() -> Data:
    """scikit-learn's digits as rows of 14 x 14 pixels, to train on and held out."""
    from digits import small  # imported late: it takes seconds

    train, heldout = ((avg_pool2d(images, 2).flatten(1), labels) for images, labels in small())
    return train, {"train": train, "heldout": heldout}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(196, 512), nn.ReLU(), nn.Linear(512, 10))


DIGITS = Task("digits", net, data, batch=16)


def digits_case(
    name: str, algorithm: offbeat.Algorithm, workers: int, steps: int, **more: Any
) -> Case:
    """At the paper's rate: 0.1 for 256 images in a step."""
    rate = 0.1 * workers * DIGITS.batch / 256
    return Case(name, DIGITS, algorithm, workers, steps, rate, **more)


def timed(
    methods: Methods, nodes: int, steps: int, pause: Pause | None = None, rate: str | None = LINK,
    runs: int = 1,
) -> dict[str, list[Outcome]]:  # fmt: skip
    """The runs of each method on emulated nodes with one process each."""
    cases = [
        digits_case(name, method, nodes, steps, pause=pause, seed=run)
        for run in range(runs)
        for name, method in methods.items()
    ]
    found = in_lab(cases, rate)
    return {name: found[index :: len(methods)] for index, name in enumerate(methods)}


def seconds(methods: Methods, *where: Any) -> dict[str, float]:
    """Of a step of each method, in one run."""
    return {name: run.seconds for name, (run,) in timed(methods, *where).items()}
