"""Real processes that are killed, frozen or busy: the first two are found soon, the last never."""

import ctypes
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import offbeat
from offbeat.liveness.heartbeats import heartbeat
from offbeat.liveness.heartbeats.beacon import Beacon, Place
from offbeat.liveness.heartbeats.probe import Probe
from offbeat.platform.answering import GREETING, HERE, question
from ranks import Spawned

HOST = "127.0.0.1"
VICTIM = 2


def _train(rank: int, results: Any, fault: str) -> None:
    if fault != "killed":  # in half of the usual time
        heartbeat.MUTE_AFTER = heartbeat.SILENT_AFTER = heartbeat.BROKEN_AFTER = 3.0
    replica = offbeat.replicate(model := torch.nn.Linear(4, 1), offbeat.ddp())
    try:
        for step in range(200):
            if (rank, step) == (VICTIM, 100):
                results.put(("hit", time.monotonic()))
                results.close()
                results.join_thread()
                HITS[fault]()
            model(torch.ones(4)).sum().backward()
            replica.step()
            time.sleep(0.02)
        replica.finish()
    except offbeat.PeerLost as error:
        results.put((str(error), time.monotonic()))
    replica.detach()


def _be_killed() -> None:
    if os.fork() == 0:  # as a worker of a data loader, which has all descriptors of its parent
        time.sleep(8)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def _freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _hold_the_lock() -> None:
    """Sleep in a call that keeps Python's lock, as one of a careless library does."""
    ctypes.PyDLL(None).usleep(6_000_000)


HITS: dict[str, Callable[[], None]] = {
    "killed": _be_killed,
    "frozen": _freeze,
    "busy": _hold_the_lock,
}


def found_by_others(fault: str) -> dict[str, list[float]]:
    """The errors of the others, and after how many seconds each was raised."""
    world = Spawned(_train, 4, fault)
    try:
        for rank, process in enumerate(world.processes):
            if rank != VICTIM or fault == "busy":
                process.join(60)
    finally:
        world.processes[VICTIM].kill()
    said = world.join(timeout=5)
    (hit,) = (when for text, when in said if text == "hit")
    found: dict[str, list[float]] = {}
    for text, when in said:
        if text != "hit":
            found.setdefault(text, []).append(when - hit)
    return found


@pytest.mark.processes
@pytest.mark.parametrize(
    ("fault", "why", "limit"),
    [("killed", "its process has ended", 4.0), ("frozen", "no answer for 3 s", 8.0)],
)
@pytest.mark.fault(
    "a process is killed, or freezes",
    "PeerLost on all others, after less than 1 s or about 6 s; names it and says why",
    group="Lost ranks and connections",
)
def test_a_lost_process_is_known_to_all_others_soon(fault: str, why: str, limit: float) -> None:
    """Also if its children live on. The limits leave time to a machine with other work."""
    ((text, seconds),) = found_by_others(fault).items()
    assert text.startswith(f"rank {VICTIM} is lost: {why}, last heartbeat in ")
    assert len(seconds) == 3
    assert max(seconds) < limit


@pytest.mark.processes
@pytest.mark.fault(
    "a call holds Python's lock for long",
    "the others wait; no error",
    group="Lost ranks and connections",
)
def test_a_process_that_holds_pythons_lock_is_waited_for() -> None:
    assert found_by_others("busy") == {}


class Asking:
    """A probe with a clock of its own."""

    def __init__(self, place: Place) -> None:
        self.probe, self.now = Probe(place), 0.0

    def until(self, is_over: Callable[[Probe], bool], every: float = 1.0) -> None:
        """Look until ``is_over``, for 30 seconds at most."""
        limit = time.monotonic() + 30.0
        while not is_over(self.probe):
            assert time.monotonic() < limit
            self.look(every)

    def look(self, every: float = 1.0) -> None:
        self.now += 0.1
        self.probe.look(self.now, every)
        time.sleep(0.005)


@pytest.fixture
def beacon() -> Beacon:
    return Beacon()


def test_a_beacon_answers_for_each_of_its_heartbeats(beacon: Beacon) -> None:
    first, second = (beacon.light([HOST]) for _ in range(2))
    assert first is not None
    assert second is not None
    asking = [Asking(place) for place in (first, second)]
    for one in asking:
        one.until(lambda probe: probe.is_known)
    beacon.put_out(first)
    asking[0].until(lambda probe: probe.has_ended)
    for _ in range(20):
        asking[1].look()
    assert not asking[1].probe.has_ended
    beacon.put_out(second)
    asking[1].until(lambda probe: probe.has_ended)


def test_the_address_that_answers_is_found_among_several(beacon: Beacon) -> None:
    place = beacon.light(["203.0.113.1", HOST])  # the first is nobody's
    assert place is not None
    asking = Asking(place)
    asking.until(lambda probe: probe.is_known)
    asking.probe.close()
    beacon.put_out(place)


def test_nobody_is_taken_for_ended_before_it_has_answered(beacon: Beacon) -> None:
    """An address may mean another machine here: it refuses, or another beacon answers there."""
    place = beacon.light([HOST])
    assert place is not None
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    for wrong in (place._replace(key="another"), place._replace(port=port)):
        asking = Asking(wrong)
        for _ in range(50):
            asking.look()
        assert not asking.probe.is_known
        assert not asking.probe.has_ended
        asking.probe.close()
    beacon.put_out(place)


def test_a_process_that_has_answered_for_one_heartbeat_is_known_for_all(beacon: Beacon) -> None:
    """Its end is known at once after a change of ranks; not that of another at its address."""
    first, second = (beacon.light([HOST]) for _ in range(2))
    assert first is not None
    assert second is not None
    stranger = Probe(second._replace(key="another/0"))
    asking = Asking(first)
    asking.until(lambda probe: probe.is_known)
    beacon.put_out(first)
    beacon.put_out(second)
    asking.probe.close()
    for probe, ended in ((Probe(second), True), (stranger, False)):
        fresh = Asking(second)
        fresh.probe = probe
        for _ in range(3):
            fresh.look()
        assert probe.has_ended == ended
        assert probe.is_refused
        probe.close()


def test_a_process_that_does_not_answer_is_asked_over_new_connections() -> None:
    """The operating system still accepts those of a frozen process."""
    with socket.create_server((HOST, 0)) as server:
        place = Place([HOST], server.getsockname()[1], "key")
        asking = Asking(place)
        asking.look()
        accepted, _ = server.accept()
        asking.look()
        assert accepted.recv(100) == GREETING + question("key")
        accepted.sendall(HERE)
        asking.until(lambda probe: probe.is_known)
        for _ in range(30):
            asking.look()
        since = asking.probe.mute_since
        assert since is not None
        assert 1.5 < asking.now - since < 3.0, "since the first question without an answer"
        again = [server.accept()[0] for _ in range(2)]
        again[-1].sendall(HERE)
        asking.until(lambda probe: probe.mute_since is None)
        assert not asking.probe.has_ended
        for connection in (accepted, *again):
            connection.close()
    asking.until(lambda probe: probe.has_ended)
