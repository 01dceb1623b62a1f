"""Ranks connect to those with which they speak, at the attach, and to nobody else."""

import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import HashStore
from torch.optim import SGD

import offbeat
from offbeat.liveness.failure import NoHeartbeat, PeerLost
from offbeat.platform.peers import collective_peers
from offbeat.platform.process_group import connect_to, open_loopback
from offbeat.testing import ThreadWorld
from offbeat.topology.graph import neighbours
from offbeat.transport.group import Group, close_at_exit, close_sockets
from offbeat.transport.links import Links
from offbeat.transport.meter import Meter
from offbeat.transport.world import World
from problems import Quadratic, loss
from recipe_cases import CASES, Case, of_each_recipe

SIZE = 20


def sockets() -> set[str]:
    """The sockets of this process, by the numbers of the kernel."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            found.add(os.readlink(entry))
    return {name for name in found if name.startswith("socket")}


# Those of another wire speak to the same ranks.
@pytest.mark.parametrize(
    "case",
    of_each_recipe(case for case in CASES if "wire=" not in case.text),
    ids=lambda case: case.text,
)
@pytest.mark.filterwarnings("ignore:.* weights come down to")
def test_all_connections_are_made_at_the_attach(case: Case) -> None:
    """None in a step, where the first message between two ranks would block one of them."""
    barrier = threading.Barrier(5, timeout=50)
    attached, trained = set[str](), set[str]()

    def worker(world: World) -> None:
        model = Quadratic(torch.float32)
        replica = offbeat.replicate(model, case.algorithm, mesh=world)
        optimizer = SGD(model.parameters(), lr=0.1)
        if barrier.wait() == 0:
            attached.update(sockets())
        barrier.wait()
        for step in range(9):
            loss(model, world.rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
        with replica.consensus():
            pass
        replica.consensus_distance()
        replica.load_state_dict(replica.state_dict())
        replica.finish()
        if barrier.wait() == 0:
            trained.update(sockets())
        barrier.wait()
        replica.detach()

    ThreadWorld(nodes=case.nodes(5)).run(worker)
    assert trained <= attached


@pytest.mark.parametrize("recipe", ["sgp", "ddp", "local_sgd(every=2)", "lags(density=0.1)"])
def test_connections_grow_with_the_logarithm_of_the_world(recipe: str) -> None:
    before, barrier, found = sockets(), threading.Barrier(SIZE, timeout=50), set[str]()

    def worker(world: World) -> None:
        model = nn.Linear(2, 1)
        optimizer = SGD(model.parameters(), lr=0.1)
        given = offbeat.algorithm(recipe)
        replica = offbeat.replicate(model, given, mesh=world, optimizer=optimizer)
        if barrier.wait() == 0:
            found.update(sockets() - before)
        barrier.wait()
        replica.detach()

    ThreadWorld(SIZE).run(worker)
    control = [collective_peers(rank, SIZE) for rank in range(SIZE)]
    graph = [neighbours(offbeat.Exponential(), rank, SIZE) for rank in range(SIZE)]
    slot = [a | b if recipe == "sgp" else a for a, b in zip(control, graph, strict=True)]
    listeners = 2 * SIZE
    assert len(found) == listeners + sum(map(len, (*control, *slot)))


def test_members_of_a_small_group_know_all_addresses_once_it_is_open() -> None:
    """To connect they ask the store no more, which may be far away."""
    size, store, barrier = 3, HashStore(), threading.Barrier(3, timeout=30)
    met = list[int]()

    def member(rank: int) -> None:
        group = open_loopback(store, rank, size, is_lazy=True, connections=2)
        if barrier.wait() == 0:
            keys = store.list_keys()
            assert len(keys) == 2 * size
            for key in keys:
                store.delete_key(key)
        barrier.wait()
        connect_to(group, {*range(size)} - {rank})
        met.append(rank)

    members = [threading.Thread(target=member, args=(rank,)) for rank in range(size)]
    for thread in members:
        thread.start()
    for thread in members:
        thread.join(20)
    assert sorted(met) == [*range(size)]


def test_a_message_that_nobody_reads_does_not_keep_a_group_alive() -> None:
    """As that of an overlapped step before detach(): the thread of Gloo polled it for ever."""
    before, store, barrier = threading.active_count(), HashStore(), threading.Barrier(2, timeout=30)

    def member(rank: int) -> None:
        group = open_loopback(store, rank, 2, is_lazy=True)
        connect_to(group, [1 - rank])
        held = Group(group, (0, 1), "world", NoHeartbeat(rank, (0, 1)), Meter(), [1 - rank])
        close_at_exit(held)
        if rank == 1:
            work = group.recv([torch.empty(1000)], 0, 5)
            barrier.wait()
            del work
            barrier.wait()
        else:
            barrier.wait()
            barrier.wait()
            work = group.send([torch.zeros(1000)], 1, 5)
            time.sleep(0.3)
            del work
        barrier.wait()
        del group
        close_sockets([held])

    members = [threading.Thread(target=member, args=(rank,)) for rank in range(2)]
    for thread in members:
        thread.start()
    for thread in members:
        thread.join(20)
    assert threading.active_count() <= before


def test_a_rank_that_is_lost_while_others_connect_to_it_is_named(
    monkeypatch: pytest.MonkeyPatch, fast_heartbeat: None
) -> None:
    """Rank 1 ends between the roll call and its first connection: it never says hello."""
    monkeypatch.setattr("offbeat.liveness.heartbeats.heartbeat.SILENT_AFTER", 1.0)
    others_know = threading.Barrier(3, timeout=40)
    connect = Links.open

    def end(self: Links, *args: Any, **kwargs: Any) -> Any:
        if self.world.rank == 1:
            self.heartbeat._end_thread()
            others_know.wait()
            raise SystemExit
        return connect(self, *args, **kwargs)

    def worker(world: World) -> str:
        with pytest.raises((PeerLost, SystemExit)) as raised:
            offbeat.replicate(nn.Linear(2, 1), offbeat.ddp(), mesh=world)
        if world.rank != 1:
            others_know.wait()
        return str(raised.value)

    monkeypatch.setattr(Links, "open", end)
    first, _, last = ThreadWorld(3).run(worker)
    assert first == last
    assert "rank 1 is lost" in first
