"""Detaching frees what attaching took: sockets, threads, and keys in the store."""

import os
import threading
import warnings

import pytest
from torch import nn
from torch.distributed import HashStore

import offbeat
from held import descriptors, settles, threads
from offbeat.attach.connection import Connection
from offbeat.exchange import BoundGradients
from offbeat.liveness.failure import PeerLost
from offbeat.testing import ThreadWorld
from offbeat.transport.world import World


def megabytes() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def attach_and_detach(world: World, text: str, together: threading.Barrier) -> offbeat.Replica:
    replica = offbeat.replicate(nn.Linear(2, 2), offbeat.algorithm(text), mesh=world)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        replica.step()
    together.wait(10)  # no step of ad_psgd waits: the other rank may still be in replicate()
    replica.detach()
    return replica


@pytest.mark.fault(
    "a script attaches and detaches a thousand times",
    "descriptors, threads, memory and keys in the store do not grow",
)
@pytest.mark.parametrize("text", ["local_sgd(every=1)", "sgp(overlap=1)", "ad_psgd"])
def test_cycles_leave_nothing_behind(text: str) -> None:
    world, kept = ThreadWorld(2), list[offbeat.Replica]()
    store, together = world.world(0).store, threading.Barrier(2)
    assert isinstance(store, HashStore)

    def cycles(world: World, count: int) -> None:
        for _ in range(count):
            kept.append(attach_and_detach(world, text, together))  # no garbage collector may help

    before = descriptors(), threads()
    world.run(lambda world: cycles(world, 5))
    warm = megabytes()
    world.run(lambda world: cycles(world, 30))
    assert settles(descriptors, before[0])
    assert settles(threads, before[1])
    assert settles(store.num_keys, 2), store.list_keys()  # the number of replicas, by rank
    assert megabytes() < warm + 10


def test_a_rank_that_leaves_early_does_not_wait_and_frees_later() -> None:
    descriptors_before, has_left = descriptors(), threading.Event()
    world = ThreadWorld(2)

    def work(world: World) -> offbeat.Replica:
        replica = offbeat.replicate(nn.Linear(2, 2), offbeat.local_sgd(), mesh=world)
        if world.rank == 1:
            assert has_left.wait(10), "the other rank waits in detach()"
            assert descriptors() > descriptors_before, "this rank still uses its connection"
        replica.detach()
        has_left.set()
        return replica

    replicas = world.run(work)
    assert settles(descriptors, descriptors_before)
    assert len(replicas) == 2


@pytest.mark.usefixtures("fast_heartbeat")
@pytest.mark.fault(
    "a rank detaches while another one waits for it",
    "PeerLost on the other rank; once that detaches too, both have freed everything",
)
def test_a_rank_that_finds_another_gone_lets_it_leave() -> None:
    before, has_left = (descriptors(), threads()), threading.Event()

    def work(world: World) -> offbeat.Replica:
        replica = offbeat.replicate(nn.Linear(2, 2), offbeat.local_sgd(), mesh=world)
        if world.rank == 1:
            assert has_left.wait(10)
            with pytest.raises(PeerLost, match="rank 0 has left"):
                replica.finish()
        replica.detach()
        has_left.set()
        return replica

    replicas = ThreadWorld(2).run(work)
    assert settles(threads, before[1])
    assert settles(descriptors, before[0])
    assert len(replicas) == 2


def test_the_gradients_slot_is_detached_even_if_the_connection_cannot_be_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    detached, close = list[BoundGradients](), Connection.close

    def fail(self: Connection, ends_run: bool = False) -> None:
        close(self, ends_run)
        raise RuntimeError("cannot close")

    monkeypatch.setattr(Connection, "close", fail)
    monkeypatch.setattr(BoundGradients, "detach", lambda slot: detached.append(slot))

    def work(world: World) -> None:
        replica = offbeat.replicate(nn.Linear(2, 2), offbeat.ddp(), mesh=world)
        with pytest.raises(RuntimeError, match="cannot close"):
            replica.detach()

    ThreadWorld(2).run(work)
    assert len(detached) == 2
