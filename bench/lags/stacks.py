"""The paper's three models as layers of their sizes, whose computation is a pause.

A pause takes time but no CPU core, as computation on an accelerator does. Blocks are layers.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bench.harness.pause import Pause

SMALLER = 16  # times fewer entries than the paper's models have
MILLION = 10**6
NOISE = 1e-4  # keeps the loss where it is, and with it the size of the gradients


class Block(NamedTuple):
    """Entries of a block in millions, and its share of the computation, in any unit."""

    entries: float
    work: float


class Stack(nn.Module):
    """Layers one after the other, each of which pauses forward and twice as long backward."""

    def __init__(self, blocks: Sequence[Block], seconds: float) -> None:
        super().__init__()
        sizes = [int(block.entries * MILLION / SMALLER) for block in blocks]
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in sizes)
        self.noise = [NOISE * torch.randn(size) for size in sizes]
        total = sum(block.work for block in blocks)
        self.pauses = [seconds / 3 * block.work / total for block in blocks]

    def forward(self, x: Tensor) -> Tensor:
        for weight, noise, pause in zip(self.weights, self.noise, self.pauses, strict=True):
            x = Pause.apply(x + torch.stack([weight @ noise, x.new_zeros(())]), pause)
        return x


# Bottleneck blocks have about equal work; their entries grow with depth.
RESNET_50 = (
    Block(0.01, 0.5),
    *[Block(0.07, 1)] * 3,
    Block(0.38, 1.5), *[Block(0.28, 1)] * 3,
    Block(1.51, 1.5), *[Block(1.12, 1)] * 5,
    Block(6.04, 1.5), *[Block(4.46, 1)] * 2,
    Block(2.05, 0.01),
)  # fmt: skip
# Stem, 4 modules A, a reduction, 7 modules B, a reduction, 3 modules C, classifier.
INCEPTION_V4 = (
    Block(0.6, 2.5),
    *[Block(0.32, 0.4)] * 4,
    Block(2.3, 0.9),
    *[Block(2.9, 0.8)] * 7,
    Block(3.0, 0.4),
    *[Block(4.5, 0.3)] * 3,
    Block(1.5, 0.01),
)
# Embedding, two LSTM layers of 1,500 units, softmax over 10,000 words.
LSTM_PTB = (Block(15, 0.01), Block(18, 18), Block(18, 18), Block(15, 15))
