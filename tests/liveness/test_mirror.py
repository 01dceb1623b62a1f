"""A store whose server ends and is started again at the same address holds what it held."""

import gc
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import DistNetworkError, TCPStore

from offbeat.elastic.join import tell
from offbeat.liveness.store import client as store
from offbeat.liveness.store import mirror
from offbeat.liveness.store.client import StoreSilent, TimedStore
from offbeat.liveness.store.mirror import Mirror
from offbeat.platform.tcp_store import connect_store, host_store


class Server:
    """A TCPStore that can be ended, with all connections, and started again."""

    def __init__(self) -> None:
        self.store: TCPStore | None = host_store(0)
        self.port = self.store.port

    def end(self) -> None:
        self.store = None
        gc.collect()

    def start(self) -> None:
        self.store = host_store(self.port)

    def client(self) -> Any:
        return connect_store(f"127.0.0.1:{self.port}")


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.end()


def restart(server: Server) -> None:
    server.end()
    server.start()


def test_each_writes_back_what_it_knows(server: Server) -> None:
    first, second = Mirror(server.client()), Mirror(server.client())
    first.set("own", "1")
    first.add("count", 2)
    second.add("count", 3)
    for one, word in ((first, "0 "), (second, "10 "), (first, "1=5 ")):
        one.append("words", word)
    first.compare_set("record", "", "old")
    second.compare_set("record", "", "")
    second.multi_get(["own", "record"])
    first.compare_set("record", "old", "new")
    first.delete_key("gone")
    restart(server)
    # The second one comes back first, with an old value of the record.
    assert second.get("record") == b"old"
    assert second.get("own") == b"1"  # of the other one, which may be lost
    assert second.add("count", 1) == 6
    first.set("own", "2")  # sent over the broken connection, without an error
    assert first.check(["own"])
    assert second.get("record") == b"new"
    assert second.get("own") == b"2"
    assert first.add("count", 0) == 6
    assert sorted(first.get("words").split()) == [b"0", b"10", b"1=5"]


def test_what_another_has_written_is_written_back_by_who_remembers_it(server: Server) -> None:
    first, second = (TimedStore(server.client(), returns=True).under("part") for _ in range(2))
    first.set("key", "1")
    second.remember("key", "1")
    first.close()
    restart(server)
    assert second.find("key") == "1"
    second.close()


def test_one_who_wrote_before_another_brings_nothing_old_back(server: Server) -> None:
    """As the first rank of a run, which may come back, and then writes for the others again."""
    first, second = (TimedStore(server.client(), returns=True) for _ in range(2))

    def told(store: TimedStore, value: str, *ranks: int) -> None:
        world = SimpleNamespace(rank=ranks[0], ranks=sorted(ranks))
        links: Any = SimpleNamespace(run=1, world=world, store=store)
        tell(links, "key", value)

    told(second, "B", 1)  # alone
    told(first, "B", 0, 1)  # which has come back
    told(second, "B", 1, 0)
    told(first, "C", 0, 1)
    restart(server)
    assert first.find("key") == "C"
    assert second.find("other") is None  # it comes back, and knows B alone
    told(second, "C", 1, 0)
    assert first.find("key") == "C"
    first.close()
    restart(server)
    assert second.find("key") == "C"
    told(second, "C", 1)  # alone again: it knows what it has said already
    restart(server)
    assert second.find("key") == "C"
    second.close()


def test_an_older_value_replaces_no_newer_one(server: Server) -> None:
    first, second = Mirror(server.client()), Mirror(server.client())
    first.compare_set("record", "", "old")
    second.compare_set("record", "old", "new")
    second.compare_set("record", "new", "newest")
    restart(server)
    assert second.check(["record"])
    assert first.compare_set("record", "?", "?") == b"newest"
    assert second.get("record") == b"newest"


def test_a_key_that_is_not_there_stays_so(server: Server) -> None:
    one = Mirror(server.client())
    assert one.compare_set("none", "?", "?") == b"?"
    one.set("deleted", "1")
    one.delete_key("deleted")
    restart(server)
    assert not one.check(["none"])
    assert not one.check(["deleted"])


def test_keys_that_are_remembered_are_few(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "KEPT", 3)
    one = Mirror(server.client())
    for number in range(10):
        one.set(f"key{number}", "1")
    restart(server)
    one.add("count", 1)
    assert sorted(one.list_keys()) == ["count", "key7", "key8", "key9"]


def test_calls_wait_for_the_server_longer_than_their_limit(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "LIMIT", 0.5)
    monkeypatch.setattr(store, "TICK", 0.1)
    timed = TimedStore(server.client(), returns=True).under("part")
    timed.set("key", "1")
    server.end()
    later = threading.Timer(1.5, server.start)
    later.start()
    assert timed.find("key") == "1"
    client, sockets = timed.another_client()
    client.set("other", "2")
    assert sockets
    timed.close()
    later.join()


@pytest.mark.fault(
    "`offbeat store` is killed and not started again within a minute",
    "PeerLost: the store is lost; on all ranks that need it",
)
def test_a_server_that_stays_away(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "AWAY", 0.5)
    timed = TimedStore(server.client(), returns=True)
    server.end()
    with pytest.raises(DistNetworkError, match=r"no store at 127.0.0.1:\d+ for 0 s"):
        timed.find("key")
    with pytest.raises(StoreSilent):
        timed.find("key")


def test_a_rank_that_leaves_does_not_wait(server: Server) -> None:
    timed, started = TimedStore(server.client(), returns=True), time.monotonic()
    timed.find("key")
    server.end()
    timed.limit(0.2)
    with pytest.raises(StoreSilent):
        timed.find("key")
    timed.close()
    assert time.monotonic() - started < 10


def test_a_server_that_is_silent_is_called_anew(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that loses power closes no connection."""
    monkeypatch.setattr(store, "LIMIT", 0.5)
    monkeypatch.setattr(store, "TICK", 0.1)
    timed = TimedStore(server.client(), returns=True)
    timed.set("key", "1")
    assert server.store is not None
    threading.Timer(0.7, server.store.set, ("late", "1")).start()
    assert timed._calls("get", "late") == b"1"  # waits, is broken off, and is made again
    timed.close()
