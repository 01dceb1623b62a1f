"""The GPT of the examples with 3.2 million parameters, 13 MB, on characters."""

from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from char_gpt import GPT, loss_of, read_corpus
from torch import Tensor, nn

from bench.harness.attached import Task

CONTEXT, BATCH, WINDOWS = 128, 3, 64  # characters; windows of a step and rank; held-out windows


def gpt(width: int = 256, depth: int = 4, context: int = CONTEXT, batch: int = BATCH) -> Task:
    """The same model on every rank, and windows of text, of which every rank draws its own."""
    text, _ = read_corpus()
    torch.manual_seed(0)

    def loss(module: nn.Module, random: torch.Generator) -> Tensor:
        starts = torch.randint(len(text) - context, (batch,), generator=random)
        return loss_of(module, text, starts, context)

    return Task(GPT(width, depth, 4, context), loss)


def gpt_with_heldout(windows: int = WINDOWS, context: int = CONTEXT, **sizes: int) -> Task:
    """The same, evaluated after each turn on held-out text, of which every rank reads its share."""
    task, (_, text) = gpt(context=context, **sizes), read_corpus()
    starts = torch.linspace(0, len(text) - context - 1, windows).long()
    share = starts[dist.get_rank() :: dist.get_world_size()]
    return replace(task, heldout=partial(loss_of, text=text, starts=share, context=context))
