"""Real processes that are killed in the middle of a large message."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import offbeat
from offbeat.transport.collectives import broadcast
from offbeat.transport.group import Group
from offbeat.transport.links import Links
from offbeat.transport.messages import exchange
from offbeat.transport.world import World
from ranks import Spawned

SOURCE = 0
LARGE = 50_000_000  # floats: half a second of a broadcast, and several pieces of a message


def _broadcast(tensor: torch.Tensor, group: Group) -> None:
    broadcast(tensor, SOURCE, group).wait()


def _send(tensor: torch.Tensor, group: Group) -> None:
    if group.rank == SOURCE:
        exchange([(1, tensor), (2, tensor)], [], group).wait()
    else:
        exchange([], [(SOURCE, tensor)], group).wait()


CALLS: dict[str, Callable[[torch.Tensor, Group], None]] = {"broadcast": _broadcast, "send": _send}


def _repeat(rank: int, results: Any, call: str) -> None:
    links = Links.connect(World.discover())
    group = links.open("world")
    assert group is not None
    tensor = torch.zeros(LARGE)
    try:
        while True:
            CALLS[call](tensor, group)
            if rank == SOURCE:
                results.put("running")
    except offbeat.PeerLost as error:
        results.put(str(error))
    links.close()


@pytest.mark.processes
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.fault(
    "a process is killed while it sends a large message",
    "PeerLost on all others",
    group="Lost ranks and connections",
)
def test_half_a_message_holds_nobody(call: str) -> None:
    world = Spawned(_repeat, 3, call)
    assert world.results.get(timeout=60) == "running"
    time.sleep(0.1)
    world.processes[SOURCE].kill()
    said = [text for text in world.join(timeout=30) if text != "running"]
    assert len(said) == 2
    assert {text.partition(":")[0] for text in said} == {f"rank {SOURCE} is lost"}
