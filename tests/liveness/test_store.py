"""No wait depends on a store that may never answer."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore

import offbeat
from offbeat.liveness.heartbeats import heartbeat
from offbeat.liveness.heartbeats.status_record import JoinRequest, Status, StatusRecord
from offbeat.liveness.store import client
from offbeat.liveness.store.client import StoreSilent, TimedStore
from offbeat.platform import tcp_store
from offbeat.platform.process_group import open_loopback
from offbeat.transport.run.membership import Membership
from offbeat.transport.run.run_watch import RunWatch
from offbeat.transport.world import World
from ranks import Spawned, fork_server, free_port


class Freezing:
    """A store whose calls block from some moment on, as with a host without power."""

    def __init__(self) -> None:
        self.running = threading.Event()
        self.running.set()

    def clone(self) -> "Freezing":
        return self

    def check(self, keys: list[str]) -> bool:
        self.running.wait(30)
        return "there" in keys


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Freezing]:
    monkeypatch.setattr(client, "LIMIT", 0.3)
    monkeypatch.setattr(client, "TICK", 0.1)
    frozen = Freezing()
    yield frozen
    frozen.running.set()


def test_a_call_that_is_not_answered_ends_and_later_ones_fail_at_once(store: Freezing) -> None:
    timed = TimedStore(store)  # type: ignore[arg-type]
    assert (timed.check(["there"]), timed.check(["absent"])) == (True, False)
    store.running.clear()
    started = time.monotonic()
    with pytest.raises(StoreSilent, match="no answer"):
        timed.check(["there"])
    first = time.monotonic() - started
    store.running.set()
    started = time.monotonic()
    with pytest.raises(StoreSilent, match="no answer"):
        timed.check(["there"])
    timed.close()
    assert time.monotonic() - started < first


def test_closing_ends_a_call_of_another_thread(
    store: Freezing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "LIMIT", 60.0)
    timed, errors = TimedStore(store), list[Exception]()  # type: ignore[arg-type]
    store.running.clear()

    def ask() -> None:
        try:
            timed.check(["there"])
        except StoreSilent as error:
            errors.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(0.1)
    timed.close()
    asking.join(5)
    assert len(errors) == 1


class Broken:
    """A store whose host is gone: torch logs a stack for every call."""

    calls = 0

    def clone(self) -> "Broken":
        return self

    def set(self, key: str, value: str) -> None:
        self.calls += 1
        raise dist.DistNetworkError("Broken pipe")


def test_a_heartbeat_does_not_call_a_store_again_whose_connection_is_lost() -> None:
    timed, broken = TimedStore(HashStore()), Broken()
    beating = heartbeat.Heartbeat(timed, 0, (0, 1))
    timed._calls.client._store = broken  # type: ignore[assignment]
    for _ in range(3):
        beating._tick()
    with pytest.raises(offbeat.PeerLost, match=r"no longer answers \(Broken pipe\)"):
        beating.raise_agreed_error()
    beating.stop()
    assert broken.calls == 1


def test_calls_of_the_store_pass_through() -> None:
    timed = TimedStore(HashStore()).under("part")
    timed.set("a", "1")
    assert (timed.get("a"), timed.multi_get(["a"])) == (b"1", [b"1"])
    assert (timed.add("n", 2), timed.add("n", 0)) == (2, 2)
    assert (timed.compare_set("b", "", "x"), timed.compare_set("b", "", "y")) == (b"x", b"x")
    timed.delete_key("a")
    assert not timed.check(["a"])
    timed.close()


def _host(port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    time.sleep(60)
    del store


def _train_until_frozen(rank: int, results: Any, port: int, host: int, ends: str) -> None:
    client.LIMIT, heartbeat.BEAT, heartbeat.PROMPT = 2.0, 0.2, 0.5
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    world = World(rank, ((0,), (1,), (2,)), store, open_loopback)
    replica = offbeat.replicate(nn.Linear(2, 2), offbeat.local_sgd(every=1), mesh=world)
    replica.step()
    error, started = "no error", time.monotonic()
    try:
        if rank == 1:
            os.kill(host, signal.SIGSTOP)
            if ends == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(6)  # the others wait for it, and cannot ask the store whether it lives
        replica.step()
    except offbeat.PeerLost as lost:
        error = str(lost)
    waited, started = time.monotonic() - started, time.monotonic()
    replica.detach()
    results.put((rank, error, waited, time.monotonic() - started))


@pytest.mark.processes
@pytest.mark.fault(
    "the host of the store freezes, or the link to it is cut",
    "PeerLost on every rank that waits within 10 s",
)
@pytest.mark.parametrize("ends", ["killed", "asleep"])
def test_a_store_that_freezes_ends_every_wait(ends: str) -> None:
    port = free_port()
    host = fork_server().Process(target=_host, args=(port,))
    host.start()
    try:
        assert host.pid is not None
        said = Spawned(_train_until_frozen, 3, port, host.pid, ends).join(timeout=40)
    finally:
        host.kill()
    waiting = [result for result in said if result[0] != 1]
    assert sorted(rank for rank, *_ in waiting) == [0, 2]
    for rank, error, waited, leaving in waiting:
        assert "no longer answers" in error, f"rank {rank} said {error}"
        assert waited < 6, "it was the end of the pause that ended this wait"
        assert leaving < 3


def test_a_read_of_deleted_keys_does_not_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank that requests to join reads keys of others, which delete them when they change."""
    monkeypatch.setattr(client, "LIMIT", 2.0)
    for store in (HashStore(), dist.TCPStore("127.0.0.1", free_port(), is_master=True)):
        timed = TimedStore(store)
        record = StatusRecord(timed)
        assert (
            record.post(request=JoinRequest(4, 1)).request
            == JoinRequest(4, 1)
            == record.read().request
        )
        timed.delete_key("status")
        assert timed.find("status") is None
        assert record.read() == Status() == record.post(request=JoinRequest(4, 1))
        timed.under("run1/heartbeat").append("ranks", "0 1 ")  # whose heartbeats are deleted
        assert not RunWatch(timed, Membership(1, 0, "run1"), 4, changed=-1e9).is_over()
        timed.close()


@pytest.mark.fault(
    "no store at the address of OFFBEAT_STORE", "a warning soon, an error after 60 s"
)
def test_a_store_that_is_missing_is_told_of_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_store, "SOON", 0.1)
    monkeypatch.setattr(tcp_store, "CONNECT", 1.0)
    address = f"127.0.0.1:{free_port()}"
    with (
        pytest.warns(RuntimeWarning, match=f"no store at {address} yet; trying for 1 s") as told,
        pytest.raises(ValueError, match=f"no store at {address} within 1 s .nobody listens there"),
    ):
        tcp_store.connect_store(address)
    assert len(told) == 1
