"""A model whose computation takes time but no CPU core, as on an accelerator."""

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from bench.harness.attached import Task


class Pause(torch.autograd.Function):
    """Sleep, and twice as long backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grads[0], None


def pausing(layers: Iterable[nn.Module], seconds: float) -> None:
    """Let each of ``layers`` pause beside what it computes, together for ``seconds`` in a step."""
    each = [*layers]
    for layer in each:
        layer.register_forward_hook(lambda *given: Pause.apply(given[-1], seconds / 3 / len(each)))


class Paused(nn.Module):
    """Eight layers, 0.8 MB of parameters unless wider, which pause for ``seconds`` in a step."""

    def __init__(self, seconds: float, width: int = 156) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(8))
        self.width = width
        self.seconds = seconds / 3 / len(self.layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = Pause.apply(layer(x), self.seconds)
        return x


def paused(seconds: float, width: int) -> Task:
    """Such a model on one fixed batch."""
    x = torch.ones(1, width)
    return Task(Paused(seconds, width), lambda module, _: module(x).square().mean())
