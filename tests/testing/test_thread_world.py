"""Ranks in threads of one process: what they share besides the messages."""

import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from offbeat.testing import ThreadWorld, thread_world
from offbeat.transport.world import World


class Cycle:
    """Garbage that only a collection finds, and that lets other threads in when it is freed."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        time.sleep(0)


@pytest.fixture
def many_collections() -> Iterator[None]:
    """Collect at nearly every allocation."""
    before = gc.get_threshold()
    gc.set_threshold(1)
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize("given", [{}, {"size": -1}, {"size": 2.0}], ids=str)
def test_a_world_has_ranks(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected 1 or more, or nodes"):
        ThreadWorld(**given)


def test_no_collection_stops_ranks_that_ask_for_the_random_state(many_collections: None) -> None:
    def worker(world: World) -> int:
        for _ in range(1000):
            Cycle()
            torch.get_rng_state()
        return world.rank

    assert ThreadWorld(2).run(worker, timeout=30) == [0, 1]
    assert gc.isenabled()


def test_an_error_does_not_wait_for_ranks_that_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(thread_world, "AFTER_ERROR", 0.1)
    is_over = threading.Event()

    def worker(world: World) -> None:
        if world.rank == 1:
            raise KeyError("of rank 1")
        is_over.wait(60)

    started = time.monotonic()
    with pytest.raises(KeyError, match="of rank 1"):
        ThreadWorld(3).run(worker, timeout=60)
    is_over.set()
    assert time.monotonic() - started < 30


def test_what_ranks_leave_in_cycles_is_collected_while_they_run() -> None:
    freed = []

    class Counted(Cycle):
        def __del__(self) -> None:
            freed.append(self)

    def worker(world: World) -> bool:
        Counted()
        until = time.monotonic() + 20
        while not freed and time.monotonic() < until:
            time.sleep(0.05)
        return bool(freed)

    assert ThreadWorld(1).run(worker) == [True]
