"""Training on the device that does not exist, in a process of its own."""

import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from stand_in import NAME, coalesced, install, synchronizations
from torch import nn

import offbeat
from offbeat.exchange.engine import call_number
from offbeat.platform.device import event_after, wait_for_stream
from offbeat.testing import ThreadWorld, snapshot
from offbeat.transport import group, messages
from offbeat.transport.world import World
from problems import Quadratic, flat
from recipe_cases import CASES, Case
from reference.participants import Nodes

LR, STEPS, BEFORE = 0.1, 12, 5  # BEFORE: steps with what is measured once
LARGE = "lags({'even': 0.001, '*': 0.01}, wire='fp16', momentum=0.5, masking=True, clip_norm=99.0)"


@dataclass(frozen=True)
class Run:
    """What came of a case: its error, or its course, and what would make the host wait."""

    error: str
    course: Any
    waits: dict[tuple[str, str], int]


def train_all(results: Any, texts: list[str], sends: bool) -> None:
    """Train the recipes ``texts`` of the contract, as a process; put a :class:`Run` for each.

    ``sends``: messages leave from the device, as with NCCL; otherwise they go through the host.
    """
    install()
    results.put(("", _run(_try_the_device)))
    if sends:
        _send_from_device()
    results.put((LARGE, _run(partial(train_large, NAME))))
    for case in CASES:
        if case.text in texts:
            results.put((case.text, _run(partial(_train, case))))


def _run(work: Callable[[], Any]) -> Run:
    synchronizations.found.clear()
    error, course = "", None
    try:
        course = work()
    except Exception:
        error = traceback.format_exc()
    synchronizations.is_on = False
    return Run(error, course, dict(synchronizations.found))


def _try_the_device() -> list[float]:
    """Do once all that is noted, and then what is not."""
    synchronizations.is_on = True
    x, host = torch.ones(3, device=NAME), torch.ones(3)
    x[0].item()
    x.nonzero()
    x[x > 0]
    x.cpu()
    x.copy_(host)
    torch.add(x, host)
    x.tolist()
    x.numpy()
    event_after(x).synchronize()
    wait_for_stream(x.device)
    x.to("cpu", non_blocking=True)
    x.copy_(host, non_blocking=True)
    x.mul_(torch.tensor(2.0)).add_(1.0)  # one number goes along
    synchronizations.is_on = False
    return x.tolist()


class Large(nn.Module):
    """Layers in which selection goes through maxima of blocks, of whole blocks and not."""

    def __init__(self) -> None:
        super().__init__()
        self.even = nn.Parameter(torch.zeros(2**17))
        self.odd = nn.Parameter(torch.zeros(2**15 + 7))
        self.small = nn.Parameter(torch.zeros(50))


def train_large(device: str) -> Any:
    """Train by lags with all its settings, and two learning rates; the course of each rank."""

    def worker(world: World) -> list[Any]:
        model = Large().to(device)
        groups = [{"params": [model.even], "lr": 0.1}, {"params": [model.odd, model.small]}]
        optimizer = torch.optim.SGD(groups, lr=0.3)
        replica = offbeat.replicate(
            model, offbeat.algorithm(LARGE), mesh=world, optimizer=optimizer
        )
        random, course = torch.Generator().manual_seed(world.rank), []
        for step in range(2 * BEFORE + 2):
            if step == 2 * BEFORE:  # residuals and velocities enter layers that are sent whole
                replica.switch("lags(density=1.0, momentum=0.5, clip_norm=99.0)")
            target = {
                n: torch.randn(p.shape, generator=random) for n, p in model.named_parameters()
            }
            loss = [(p - target[n].to(device)).square().sum() for n, p in model.named_parameters()]
            synchronizations.is_on = BEFORE <= step < 2 * BEFORE
            line.wait()
            sum(loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
            line.wait()
            synchronizations.is_on = False
            course.append(torch.cat([*model.parameters()]).detach().cpu().numpy())
        replica.detach()
        return course

    line = threading.Barrier(2)
    return np.array(ThreadWorld(2).run(worker))


def nodes_of(case: Case) -> Nodes:
    """Unequal nodes where nodes matter and may be unequal."""
    return case.nodes(4 if case.pairs else 3)


def _train(case: Case) -> Any:
    nodes = nodes_of(case)
    line = threading.Barrier(sum(map(len, nodes)))

    def worker(world: World) -> list[Any]:
        model = Quadratic(torch.float64).to(NAME)
        replica = offbeat.replicate(model, case.algorithm, mesh=world)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
        course = [flat(snapshot(model))]
        for step in range(STEPS):
            synchronizations.is_on = step >= BEFORE
            line.wait()
            model(world.rank).backward()
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
            line.wait()
            course.append(flat(snapshot(model)))
        synchronizations.is_on = False
        replica.finish()
        replica.detach()
        return course

    return np.array(ThreadWorld(nodes=nodes).run(worker)).swapaxes(0, 1)


def _send_from_device() -> None:
    """Give groups a backend for the device, from which messages are launched as with NCCL."""
    of_group = group.backends_of
    group.backends_of = lambda opened: {**of_group(opened), torch.device(NAME, 0): "nccl"}
    messages.coalesced = coalesced
    call_number.number_on_host = lambda like: torch.empty(1, dtype=like.dtype)
