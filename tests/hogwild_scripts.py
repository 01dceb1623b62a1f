"""What workers run: functions that a spawned process can import."""

import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing import connection

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

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


def linger_or_raise(number: int) -> None:
    """Worker 0 returns with a thread that goes on; worker 1 fails a little later."""
    if number == 0:
        threading.Thread(target=time.sleep, args=(60,)).start()
        return
    time.sleep(1)
    raise KeyError("of worker 1")


def refused(attempt: Callable[[], object]) -> str:
    """The error that an attempt ends with."""
    try:
        attempt()
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def in_a_fork(attempt: Callable[[], object]) -> str:
    """The same in a forked child, which must not return into its parent's code."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.write(writer, refused(attempt).encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as answer:
        said = answer.read().decode()
    os.wait()
    return said


def train_and_err(
    number: int, lives: Tensor, model: nn.Embedding, optimizer: AsyncAdam, few: AsyncAdam
) -> tuple[Tensor, list[str]]:
    """Train, then try what must be refused, each worker its part: (number, threads), the errors.

    Worker 1 is killed in its first life, between writing moments and parameter; a child of it keeps
    its channel open until the next one has come.
    """
    if number == 1:
        lives += 1
    if number == 1 and lives[0] == 1:
        if os.fork() == 0:
            while lives[0] == 1:
                time.sleep(0.01)
            os._exit(0)
        target = optimizer._target(model.weight, 1)
        optimizer._tick(target)
        target._flat[1][:5] = 0.1
        os.kill(os.getpid(), signal.SIGKILL)
    threads = train(number, model, optimizer, 400)
    assert [batch.item() for batch in DataLoader([number], num_workers=1)] == [number]
    attempts: list[Callable[[], str]] = [
        lambda: refused(lambda: AsyncAdam([nn.Parameter(TARGET)], workers=2)),
        lambda: refused(few.step),
        lambda: refused(lambda: optimizer.add_param_group({"params": [nn.Parameter(TARGET)]})),
        lambda: in_a_fork(optimizer.step),
    ]
    return torch.tensor([number, threads]), [attempt() for attempt in attempts[number::2]]


def fail(number: int, bad: int) -> None:
    if number == bad:
        raise KeyError(f"no key in worker {number}")
    time.sleep(60)


def die_while_sending(number: int) -> str:
    """Return what only arrives in part, since the worker is killed."""

    def send_half(self: connection.Connection, message: bytes) -> None:
        os.write(self.fileno(), message[: len(message) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    connection.Connection._send = send_half
    return "a result"


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
