"""LeNet-5 and its accuracy."""

import digits
import torch
from torch import nn


def lenet() -> nn.Sequential:
    """Horovod's LeNet-5 for MNIST, without its dropout."""
    return nn.Sequential(
        nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(10, 20, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(), nn.Linear(320, 50), nn.ReLU(), nn.Linear(50, 10),
    )  # fmt: skip


@torch.no_grad()
def accuracy(model: nn.Module, held_out: digits.Images) -> float:
    """The share of images that are recognized."""
    logits = torch.cat([model(part) for part in held_out[0].split(1000)])
    return float((logits.argmax(1) == held_out[1]).float().mean())
