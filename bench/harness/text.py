"""The sources of Python's standard library as windows of characters, for small language models."""

import torch
from char_gpt import read_corpus
from torch import Tensor
from torch.nn.functional import cross_entropy

from bench.harness.case import Data, Model, Part


def windows(context: int, count: int | None = None, heldout: int = 256) -> Data:
    """Windows of so many characters, all or ``count`` of them, and the characters that follow."""

    def part(text: Tensor, count: int | None) -> Part:
        every = text.unfold(0, context + 1, 1)
        if count is not None:
            every = every[torch.linspace(0, len(every) - 1, count).long()]
        return every[:, :-1], every[:, 1:]

    train, other = read_corpus()
    return part(train, count), {"heldout": part(other, heldout)}


def loss(logits: Tensor, following: Tensor) -> Tensor:
    """In nats per character."""
    return cross_entropy(logits.flatten(0, -2), following.flatten())


@torch.no_grad()
def score(model: Model, text: Tensor, following: Tensor) -> float:
    return loss(model(text), following).item()
