"""The GPT of the examples with 3.2 million parameters, 13 MB, on characters."""

from functools import partial

import torch
import torch.distributed as dist
from char_gpt import GPT, loss_of, read_corpus
from torch import Tensor, nn

from bench.harness.attached import Task

CONTEXT, BATCH, WINDOWS = 128, 3, 64  # characters; windows of a step and rank; held-out windows


def model() -> GPT:
    """The model, with the same values on every rank."""
    torch.manual_seed(0)
    return GPT(256, 4, 4, CONTEXT)


def gpt() -> Task:
    """Windows of text, of which every rank draws its own."""
    text, _ = read_corpus()

    def loss(module: nn.Module, random: torch.Generator) -> Tensor:
        starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=random)
        return loss_of(module, text, starts, CONTEXT)

    return Task(model(), loss)


def gpt_with_heldout() -> Task:
    """The same, evaluated after each turn on held-out text, of which every rank reads its share."""
    task, (_, text) = gpt(), read_corpus()
    starts = torch.linspace(0, len(text) - CONTEXT - 1, WINDOWS).long()
    share = starts[dist.get_rank() :: dist.get_world_size()]
    heldout = partial(loss_of, text=text, starts=share, context=CONTEXT)
    return Task(task.model, task.loss, heldout)
