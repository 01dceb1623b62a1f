"""The sources of Python's standard library as windows of characters, for a small GPT."""

import torch
from char_gpt import read_corpus
from torch import Tensor
from torch.nn.functional import cross_entropy

from bench.harness.case import Data, Model, Part

HELD_OUT = 256  # windows


def windows(context: int) -> Data:
    """All windows of so many characters, and the characters that follow them."""

    def part(text: Tensor) -> Part:
        every = text.unfold(0, context + 1, 1)
        return every[:, :-1], every[:, 1:]

    train, heldout = map(part, read_corpus())
    chosen = torch.linspace(0, len(heldout[0]) - 1, HELD_OUT).long()
    return train, {"heldout": (heldout[0][chosen], heldout[1][chosen])}


def loss(logits: Tensor, following: Tensor) -> Tensor:
    """In nats per character."""
    return cross_entropy(logits.flatten(0, 1), following.flatten())


@torch.no_grad()
def score(model: Model, text: Tensor, following: Tensor) -> float:
    return loss(model(text), following).item()
