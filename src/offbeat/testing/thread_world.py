"""Worlds of threads: real collectives and messages in one process, in milliseconds."""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Store
from torch.optim import SGD, Optimizer

from offbeat.exchange import Algorithm
from offbeat.platform.process_group import open_loopback, thread_store
from offbeat.replica.replicate import replicate
from offbeat.transport.group import close_sockets, closed_among
from offbeat.transport.world import World

Result = TypeVar("Result")
Snapshot = dict[str, Tensor]
AFTER_ERROR = 10.0  # seconds in which other ranks may end after the first error


class ThreadWorld:
    """Runs ranks as threads of this process, with real Gloo groups over loopback.

    Args:
        size: the number of ranks, each on a node of its own.
        nodes: instead of ``size``, the ranks of each node.

    >>> world = ThreadWorld(3)
    >>> world.run(lambda world: world.rank)
    [0, 1, 2]
    """

    def __init__(self, size: int = 0, nodes: Sequence[Sequence[int]] | None = None) -> None:
        if nodes is None and (not isinstance(size, int) or size < 1):
            raise ValueError(f"size={size!r}, expected 1 or more, or nodes")
        self.nodes = tuple(map(tuple, nodes or [(rank,) for rank in range(size)]))
        self.size = sum(map(len, self.nodes))
        self._store = thread_store()
        self._opened: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()

    def world(self, rank: int) -> World:
        """Return the layout to pass as ``replicate(mesh=...)`` on ``rank``."""
        return World(rank, self.nodes, self._store, self._open)

    def newcomer(self) -> World:
        """Return the layout to pass, with ``elastic=True``, in a thread that is a new rank."""
        nodes = (*self.nodes, (self.size,))
        return World(self.size, nodes, self._store, self._open, is_new=True)

    def _open(
        self, store: Store, rank: int, size: int, *, is_lazy: bool = False, connections: int = 1
    ) -> ProcessGroup:
        group = open_loopback(store, rank, size, is_lazy=is_lazy, connections=connections)
        self._opened.add(group)
        return group

    def run(self, work: Callable[[World], Result], timeout: float = 60.0) -> list[Result]:
        """Call ``work`` on all ranks at once; return the results by rank.

        Raises the error that came first, once all ranks have ended, or 10 s later: those of other
        ranks may follow from it. Raises ``TimeoutError`` with the ranks that did not return within
        ``timeout`` seconds.
        """
        results: dict[int, Result] = {}
        errors: dict[int, BaseException] = {}

        def rank_main(rank: int) -> None:
            try:
                # On an accelerator all backwards of a process run on one thread of autograd: the
                # first rank that waits there for another would wait for ever.
                with torch.autograd.set_multithreading_enabled(False):
                    results[rank] = work(self.world(rank))
            except BaseException as error:
                errors[rank] = error

        threads = [
            threading.Thread(target=rank_main, args=(r,), daemon=True) for r in range(self.size)
        ]
        with _collected_outside_of_torch():
            for thread in threads:
                thread.start()
            _join(threads, timeout, errors)
        if errors:
            first = next(iter(errors))
            errors[first].add_note(f"raised on rank {first}; ranks {sorted(errors)} raised")
            raise errors[first]
        stuck = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
        if stuck:
            raise TimeoutError(f"ranks {stuck} did not come back within {timeout:.0f} s")
        # All messages were read. The idle threads of Gloo of a hundred worlds would take a core.
        close_sockets(closed_among(self._opened))
        return [results[rank] for rank in range(self.size)]


@contextmanager
def _collected_outside_of_torch() -> Iterator[None]:
    """Let no thread collect garbage by itself.

    ``torch.get_rng_state``, which activation checkpoints call, holds the lock of the generator
    while it makes its result. A collection that Python 3.11 starts there may run a finalizer, which
    lets another thread in; if that one asks for the generator too it waits with Python's lock
    held, and the whole process stands still.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _join(threads: Sequence[threading.Thread], timeout: float, errors: Sized) -> None:
    """Wait for threads; collect, once a second, what none of the threads collects.

    Young objects only: a pass over all that was ever imported holds Python's lock for 0.2 s.
    """
    deadline, is_failed = time.monotonic() + timeout, False
    while alive := [thread for thread in threads if thread.is_alive()]:
        if errors and not is_failed:
            deadline, is_failed = min(deadline, time.monotonic() + AFTER_ERROR), True
        if (left := deadline - time.monotonic()) <= 0:
            return
        alive[0].join(min(left, 1.0))
        if alive[0].is_alive():
            gc.collect(1)


def simulate(
    algorithm: Algorithm,
    model: Callable[[], nn.Module],
    loss: Callable[[nn.Module, int, int], Tensor],
    *,
    steps: int,
    size: int = 0,
    nodes: Sequence[Sequence[int]] | None = None,
    optimizer: Callable[[Any], Optimizer] = lambda parameters: SGD(parameters, lr=0.1),
    delay: Callable[[int, int], float] = lambda rank, step: 0.0,
) -> list[list[Snapshot]]:
    """Train ``size`` workers in threads; return parameters by rank and step, initial ones first.

    Args:
        algorithm: what a recipe returns.
        model: builds the model; equal on all ranks.
        loss: called with (model, rank, step).
        steps: the number of optimizer steps.
        size: the number of ranks.
        nodes: instead of ``size``, the ranks of each node.
        optimizer: builds the optimizer from the parameters.
        delay: called with (rank, step); seconds to sleep before the backward, to vary the order
            in which ranks arrive.

    >>> from offbeat import ddp
    >>> def loss(model, rank, step):
    ...     return rank * model(torch.ones(1)).sum()
    >>> (first, after), _ = simulate(ddp(), lambda: nn.Linear(1, 1), loss, steps=1, size=2)
    >>> round((after["bias"] - first["bias"]).item(), 4)  # -0.1 * (0 + 1) / 2
    -0.05
    """

    def worker(world: World) -> list[Snapshot]:
        own = model()
        replica = replicate(own, algorithm, mesh=world)
        inner = optimizer(own.parameters())
        trajectory = [snapshot(own)]
        for step in range(steps):
            time.sleep(delay(world.rank, step))
            loss(own, world.rank, step).backward()
            inner.step()
            inner.zero_grad()
            replica.step()
            trajectory.append(snapshot(own))
        replica.detach()
        return trajectory

    return ThreadWorld(size, nodes).run(worker)


def snapshot(model: nn.Module) -> Snapshot:
    """Return copies of all parameters by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}
