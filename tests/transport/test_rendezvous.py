"""OFFBEAT_STORE: what is wrong with it is said, and where it leads, ranks get their places."""

import atexit
import os
import socket
import time
import weakref
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

import offbeat
from offbeat import World
from offbeat.liveness.failure import Phase
from offbeat.liveness.heartbeats import crossed_waits
from offbeat.liveness.store.client import TimedStore
from offbeat.platform import tcp_store
from offbeat.platform.tcp_store import host_store
from offbeat.store.runs import Runs
from offbeat.transport.run import rendezvous
from offbeat.transport.run.rendezvous import VARIABLE, About


@pytest.fixture
def server() -> TCPStore:
    return host_store(0)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_store, "CONNECT", 0.3)
    monkeypatch.setattr(rendezvous, "GREETING", 0.3)


def error(monkeypatch: pytest.MonkeyPatch, address: str) -> str:
    monkeypatch.setenv(VARIABLE, address)
    with pytest.raises(ValueError) as found:  # noqa: PT011
        offbeat.replicate(torch.nn.Linear(2, 1), offbeat.ddp())
    return str(found.value)


def test_machines_of_a_site_have_one_name(
    monkeypatch: pytest.MonkeyPatch, server: TCPStore
) -> None:
    nodes = []
    for name in (None, "paris"):
        if name is not None:
            monkeypatch.setenv(rendezvous.NODE, name)
        presence = rendezvous.Presence(TimedStore(server), joins=False)
        nodes.append(presence._sign.node)
        presence._end()
        atexit.unregister(presence._end)
    assert nodes[0].startswith(socket.gethostname())
    assert nodes[1] == "paris"


class Attached:
    """The heartbeat of a replica."""

    rank, phase = 0, Phase(steps=3)


def test_a_run_of_a_moment_is_seen(monkeypatch: pytest.MonkeyPatch, server: TCPStore) -> None:
    """Training that begins and ends between two signs, which come once a second."""
    monkeypatch.setattr(rendezvous, "BEAT", 1000.0)
    monkeypatch.setattr(crossed_waits, "_all", weakref.WeakSet())
    monkeypatch.setattr(crossed_waits, "_followers", [])
    store = TimedStore(server)
    presence = rendezvous.Presence(store, joins=False)
    presence._sign = presence._sign._replace(state="starts")

    def state() -> str:
        return rendezvous.Sign.parse(store.get(rendezvous.SIGNS + presence._name).decode()).state

    def until(wanted: str) -> None:
        end = time.monotonic() + 20
        while state() != wanted:
            assert time.monotonic() < end, state()
            time.sleep(0.01)

    presence._tick()
    heartbeat: Any = Attached()
    crossed_waits.add(heartbeat)
    until("trains")
    crossed_waits.remove(heartbeat)
    until("done")
    presence._end()
    atexit.unregister(presence._end)


@pytest.mark.fault(
    "OFFBEAT_STORE is malformed, or no `offbeat store` answers there",
    "ValueError; with what to start",
)
def test_wrong_addresses(monkeypatch: pytest.MonkeyPatch, server: TCPStore) -> None:
    assert "expected 'host:port'" in error(monkeypatch, "")
    for address in ("somewhere", "host:port", ":29400", "host:0", "host:99999", "tcp://host"):
        assert "expected 'host:port'" in error(monkeypatch, address)
    here = f"127.0.0.1:{server.port}"
    assert "not one of `offbeat store`" in error(monkeypatch, here)
    port = server.port
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(ValueError, match="OFFBEAT_STORE"):
        offbeat.replicate(torch.nn.Linear(2, 1), offbeat.ddp())
    with pytest.raises(ValueError, match=f"port {port}: no store can listen there"):
        host_store(port)


@pytest.mark.fault("nobody listens at OFFBEAT_STORE", "ValueError after a minute")
def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from ranks import free_port

    said = error(monkeypatch, f"127.0.0.1:{free_port()}")
    assert "nobody listens there" in said
    assert "offbeat store --port" in said


@pytest.mark.fault(
    "the store is for another run or fewer ranks",
    "ValueError; with both names or numbers",
)
def test_another_run(monkeypatch: pytest.MonkeyPatch, server: TCPStore) -> None:
    Runs(server, About("resnet", 2))
    here = f"127.0.0.1:{server.port}"
    said = error(monkeypatch, f"{here}/gpt")
    assert "'resnet'" in said
    assert "'gpt'" in said
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert "started 4 processes" in error(monkeypatch, here)


def test_a_new_rank_that_does_not_join(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World.at(torch.distributed.HashStore(), size=2)
    with pytest.raises(ValueError, match="elastic=True"):
        offbeat.replicate(torch.nn.Linear(2, 1), offbeat.sgp(), mesh=world)
    assert VARIABLE not in os.environ
