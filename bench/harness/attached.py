"""A model under one method, in a training loop that is the same for all methods."""

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import nan
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

import offbeat

TORCH, ALONE = "torch DDP", "alone"
RATE, WARM_UP = 1e-3, 10  # of AdamW, steps
Loss = Callable[[nn.Module, torch.Generator], Tensor]
Build = Callable[[Iterable[nn.Parameter]], Optimizer]


def _nothing(*_: Any) -> None:
    pass


@dataclass(frozen=True)
class Task:
    """What is trained: a model, and its loss on a batch that a generator draws.

    ``heldout`` is the loss on this rank's share of other data, ``ended`` waits for a device.
    """

    model: nn.Module
    loss: Loss
    heldout: Callable[[nn.Module], Tensor] | None = None
    ended: Callable[[], object] = _nothing


@dataclass
class Attached:
    """What a loop calls: ``module`` computes the loss, ``after`` follows the optimizer."""

    model: nn.Module
    optimizer: Optimizer
    module: nn.Module
    after: Callable[[Tensor], object] = _nothing
    sent: Callable[[], float] = lambda: nan  # bytes so far
    stalled: Callable[[], float] = lambda: nan  # seconds so far
    shown: Callable[[], AbstractContextManager[None]] = nullcontext  # for an evaluation
    finish: Callable[[], object] = _nothing  # of what is in flight
    close: Callable[[], object] = _nothing
    lead: int | None = None  # steps of the first turn, where they are not those of all

    def __post_init__(self) -> None:
        """All methods see the same batches."""
        self.random = torch.Generator().manual_seed(1 + dist.get_rank())

    def step(self, loss_of: Loss) -> float:
        """One step of training; the seconds of its backward pass."""
        self.optimizer.zero_grad()
        loss = loss_of(self.module, self.random)
        began = time.perf_counter()
        loss.backward()
        backward = time.perf_counter() - began
        self.optimizer.step()
        self.after(loss.detach())
        return backward

    @torch.no_grad()
    def evaluate(self, loss_of: Callable[[nn.Module], Tensor]) -> float:
        with self.shown():
            found = loss_of(self.model)
        dist.all_reduce(found)
        return found.item() / dist.get_world_size()


Attach = Callable[[str, nn.Module, Build], Attached]


def attach(
    method: str | offbeat.Algorithm, model: nn.Module, build: Build, **options: Any
) -> Attached:
    """A recipe of this library with options, or torch's own; losses are those of the average."""
    if method == TORCH:
        return wrapped(model, build)
    optimizer = build(model.parameters())
    algorithm = offbeat.algorithm(method) if isinstance(method, str) else method
    replica = offbeat.replicate(model, algorithm, optimizer=optimizer, **options)

    def after(loss: Tensor) -> None:
        replica.report_loss(loss)
        replica.step()

    def total(name: str) -> float:
        return float(replica.stats()["total"][name])

    return Attached(
        model, optimizer, model, after, partial(total, "bytes_sent"),
        partial(total, "seconds_stalled"), replica.consensus, replica.finish, replica.detach,
    )  # fmt: skip


def wrapped(
    model: nn.Module, build: Build, hook: Callable[..., Any] | None = None, state: Any = None
) -> Attached:
    """Torch's DistributedDataParallel, with a communication hook or its own all-reduce."""
    module = DistributedDataParallel(model)
    if hook is not None:
        module.register_comm_hook(state, hook)
    return Attached(model, build(model.parameters()), module)


def momentum(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """SGD, its rate too small to matter."""
    return SGD(parameters, lr=0.01, momentum=0.9)


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """AdamW, whose rate warms up."""
    return warmed(AdamW(parameters), RATE, WARM_UP)


def warmed(optimizer: Optimizer, most: float, steps: int) -> Optimizer:
    """Let its rate grow for so many steps; it is that of the coming one also during backward."""
    numbers = count(1)

    def warm(*_: Any) -> None:
        rate = most * min(1.0, next(numbers) / steps)
        for group in optimizer.param_groups:
            group["lr"] = rate

    warm()
    optimizer.register_step_post_hook(warm)
    return optimizer
