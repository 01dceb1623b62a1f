"""What workers run: functions that a spawned process can import."""

import os
import signal
import time

import torch
from torch import Tensor, nn

from offbeat.hogwild import AsyncAdam, report_loss, worker

TARGET = torch.linspace(-1, 1, 50)


def distance(model: nn.Embedding) -> Tensor:
    """The mean squared distance to a target; zero at best."""
    return (model.weight - TARGET[:, None]).square().mean()


def train(number: int, model: nn.Embedding, optimizer: AsyncAdam, steps: int) -> int:
    """Steps on a few rows at a time."""
    random = torch.Generator().manual_seed(number)
    for _ in range(steps):
        rows = torch.randint(50, (10,), generator=random)
        optimizer.zero_grad()
        loss = (model(rows) - TARGET[rows, None]).square().mean()
        loss.backward()
        optimizer.step()
        report_loss(loss.detach())
    return torch.get_num_threads()


def double(number: int, factor: Tensor) -> Tensor:
    return factor * number


def fail(number: int, bad: int) -> None:
    if number == bad:
        raise KeyError(f"no key in worker {number}")
    time.sleep(60)


def die(number: int, deaths: Tensor, model: nn.Embedding, optimizer: AsyncAdam) -> int:
    """Worker 1 is killed between writing moments and parameter, the first time."""
    if number == 1 and deaths[0] == 0:
        deaths += 1
        target = optimizer._target(model.weight, 1)
        optimizer._tick(model.weight, 1)
        target._flat[1][:5] = 0.1
        os.kill(os.getpid(), signal.SIGKILL)
    return train(number, model, optimizer, 200)


def quit_silently(number: int) -> None:
    os._exit(3)


def build(number: int) -> None:
    AsyncAdam([nn.Parameter(torch.zeros(1))], workers=2)


def step_with(number: int, model: nn.Embedding, optimizer: AsyncAdam) -> None:
    train(number, model, optimizer, 1)


def interrupt(number: int, pids: Tensor) -> None:
    """Press Ctrl-C, as the terminal sends it to the parent."""
    pids[number] = os.getpid()
    while number == 0 and not pids.all():
        time.sleep(0.01)
    if number == 0:
        os.kill(os.getppid(), signal.SIGINT)
    time.sleep(60)


def who(number: int) -> int | None:
    return worker.number()
