"""The examples that DASO trains: digits with BatchNorm, and shapes to segment."""

from collections.abc import Callable
from functools import cache, partial

import digits
import digits_cnn
import segmentation
from torch import nn

from bench.harness.case import SGD, Data, Part, Task


def learnt(
    name: str,
    net: Callable[[], nn.Module],
    parts: Callable[[], tuple[Part, Part]],
    evaluate: Callable[..., tuple[float, float]],
    batch: int,
) -> Task:
    """The task of an example, whose evaluation gives a loss and a quality in 0..1."""

    def data() -> Data:
        train, heldout = parts()
        return train, {"heldout": heldout}

    def score(*case: object) -> float:
        return 100 * evaluate(*case)[1]

    return Task(name, net, cache(data), batch, score, optimizer=partial(SGD, weight_decay=1e-4))


def shapes() -> tuple[Part, Part]:
    return segmentation.pictures(2000, seed=1), segmentation.pictures(200, seed=0)


SHAPES = learnt("shapes", segmentation.UNet, shapes, segmentation.evaluate, 8)
TASKS = {  # images of all workers together, learning rate of one
    learnt("digits", digits_cnn.net, digits.small, digits_cnn.evaluate, 16): (16_000, 0.05 / 4),
    SHAPES: (6_000, 0.1 / 4),
}
