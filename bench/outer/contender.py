"""A GPT of 3.2 million parameters under one method: what a loop calls, and what it sends."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from char_gpt import GPT, loss_of, read_corpus
from torch import Tensor, nn

import offbeat

CONTEXT, BATCH, WINDOWS = 128, 3, 64  # characters, windows a step and rank, held-out windows
LR, WARM_UP = 1e-3, 10  # of AdamW, steps
Shown = Callable[[], AbstractContextManager[None]]


def gpt() -> GPT:
    """The model, with the same values on every rank."""
    torch.manual_seed(0)
    return GPT(256, 4, 4, CONTEXT)


@dataclass
class Contender:
    """A model and its method. Turns begin ``phase`` steps after a multiple of eight.

    So nothing is in flight between two turns of a method that exchanges every eight steps.
    ``shown`` is entered for an evaluation.
    """

    name: str
    model: GPT
    module: nn.Module  # what computes the loss
    optimizer: torch.optim.Optimizer
    after: Callable[[Tensor], None]  # what follows the optimizer, from the loss
    shown: Shown
    sent: Callable[[], float]  # bytes that this node has sent so far
    close: Callable[[], None]
    phase: int = 0

    def __post_init__(self) -> None:
        """All methods see the same windows of text."""
        self.data = torch.Generator().manual_seed(1 + dist.get_rank())
        self.taken = 0

    def step(self, text: Tensor) -> None:
        """One step of training."""
        self.taken += 1
        for group in self.optimizer.param_groups:
            group["lr"] = LR * min(1.0, self.taken / WARM_UP)
        self.optimizer.zero_grad()
        starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=self.data)
        loss = loss_of(self.module, text, starts, CONTEXT)
        loss.backward()
        self.optimizer.step()
        self.after(loss.detach())

    @torch.no_grad()
    def loss(self, text: Tensor) -> float:
        """The loss on held-out text, of which every rank reads its share."""
        starts = torch.linspace(0, len(text) - CONTEXT - 1, WINDOWS).long()
        with self.shown():
            share = starts[dist.get_rank() :: dist.get_world_size()]
            found = loss_of(self.model, text, share, CONTEXT)
        dist.all_reduce(found)
        return found.item() / dist.get_world_size()


def recipe(text: str) -> Contender:
    """A recipe of this library; held-out losses are those of the average."""
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), LR)
    replica = offbeat.replicate(model, offbeat.algorithm(text), optimizer=optimizer)

    def after(loss: Tensor) -> None:
        replica.report_loss(loss)
        replica.step()

    @contextmanager
    def shown() -> Iterator[None]:
        with replica.consensus():
            yield

    def sent() -> float:
        return float(replica.stats()["total"]["bytes_sent"])

    # Averages are sent after step 8; those of half a model after 4, for three more steps.
    return Contender(text, model, model, optimizer, after, shown, sent, replica.detach, phase=7)


@contextmanager
def average(model: nn.Module) -> Iterator[None]:
    """Show the mean of all ranks' parameters."""
    own = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        dist.all_reduce(p.detach())
        p.detach().div_(dist.get_world_size())
    yield
    for p, kept in zip(model.parameters(), own, strict=True):
        p.detach().copy_(kept)


def texts() -> list[Tensor]:
    """The training and the held-out text."""
    return read_corpus()


def bytes_sent() -> float:
    """What has left this node of the lab, headers included."""
    lines = Path("/proc/self/net/dev").read_text("ascii").splitlines()
    return next(float(line.split(":")[1].split()[8]) for line in lines if "eth0:" in line)
