"""OFFBEAT_TOKEN: a stranger, or a worker of another run, is told so and disturbs nobody."""

import itertools
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import offbeat
from offbeat import World
from offbeat.platform.tcp_store import host_store
from offbeat.store.runs import Runs
from offbeat.transport.run import rendezvous, token
from offbeat.transport.run.rendezvous import About
from ranks import fork_server

OURS, THEIRS = "a" * 32, "b" * 32
STEPS = 60


def use(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    if value is None:
        monkeypatch.delenv(token.VARIABLE, raising=False)
    else:
        monkeypatch.setenv(token.VARIABLE, value)


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        (OURS, None, "has a token, and OFFBEAT_TOKEN is not set"),
        (OURS, THEIRS, "has another token"),
        (None, THEIRS, "has no token"),
        (OURS, "short", "5 characters, expected at least 16"),
    ],
)
@pytest.mark.fault(
    "a process has another OFFBEAT_TOKEN than the run",
    "ValueError within 5 s; it has written nothing, and the run goes on",
)
def test_a_stranger_is_told_and_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, ours: str | None, theirs: str | None, said: str
) -> None:
    use(monkeypatch, ours)
    server = host_store(0)
    Runs(server, About("", 2))
    World.at(server, size=2, rank=0)
    there = sorted(server.list_keys())
    use(monkeypatch, theirs)
    monkeypatch.setenv(rendezvous.VARIABLE, f"127.0.0.1:{server.port}")
    for come in (World.from_env, lambda: World.at(f"127.0.0.1:{server.port}", size=2, rank=1)):
        with pytest.raises(ValueError, match=said):
            come()
    assert sorted(server.list_keys()) == there
    assert not any(value and value in str(there) for value in (ours, theirs))


def test_the_challenge_differs_each_time_and_holds_no_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(monkeypatch, OURS)
    first, second = token.challenge(), token.challenge()
    assert first != second
    for said in (first, second):
        assert OURS not in said
        token.require_same_token(said, "here")
    for said in ("", " ", "open", first[:-1], first.replace(" ", ""), "é é"):
        with pytest.raises(ValueError, match="OFFBEAT_TOKEN"):
            token.require_same_token(said, "here")


def test_runs_with_different_tokens_do_not_share_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    prefixes = set()
    for value in (None, OURS, THEIRS):
        use(monkeypatch, value)
        prefixes.add(World.at(HashStore(), size=2, rank=0).prefix)
    assert len(prefixes) == 3


@pytest.mark.fault(
    "OFFBEAT_TOKEN is set although `init_process_group` connected the ranks",
    "ValueError on all ranks; with what to use instead",
)
def test_a_process_group_that_asks_for_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, OURS)
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match=r"init_process_group\(\) connects ranks without"):
            offbeat.replicate(torch.nn.Linear(2, 1), offbeat.ddp())
    finally:
        torch.distributed.destroy_process_group()


def work(address: str, ready: Any, results: Any) -> None:
    """Train ``STEPS`` steps in the run of ``OURS``."""
    os.environ[rendezvous.VARIABLE], os.environ[token.VARIABLE] = address, OURS
    model = torch.nn.Linear(8, 1)
    replica = offbeat.replicate(model, offbeat.sgp())
    while replica.steps < STEPS:
        model(torch.randn(4, 8)).square().mean().backward()
        replica.step()
        time.sleep(0.02)
        if replica.steps == 5:
            ready.release()
    replica.detach()
    results.put(replica.steps)


def ports_of(process: int) -> set[int]:
    """The TCP ports on which a process listens."""
    own = {os.readlink(link) for link in Path(f"/proc/{process}/fd").iterdir() if link.is_symlink()}
    rows = itertools.chain(
        *(
            Path(f"/proc/{process}/net/{name}").read_text().splitlines()[1:]
            for name in ("tcp", "tcp6")
        )
    )
    fields = [row.split() for row in rows]
    return {
        int(f[1].rpartition(":")[2], 16)
        for f in fields
        if f[3] == "0A" and f"socket:[{f[9]}]" in own
    }


@pytest.mark.processes
@pytest.mark.timeout(100)
@pytest.mark.fault(
    "a stranger connects to all ports and sends what nobody expects",
    "the run goes on",
)
def test_noise_at_all_ports_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    server, context = host_store(0), fork_server()  # before: it keeps the environment
    use(monkeypatch, OURS)
    runs, ready, results = Runs(server, About("", 2)), context.Semaphore(0), context.Queue()
    arguments = (f"127.0.0.1:{server.port}", ready, results)
    ranks = [context.Process(target=work, args=arguments) for _ in range(2)]
    for rank in ranks:
        rank.start()
    try:
        until = time.monotonic() + 60
        while not all(ready.acquire(timeout=0.1) for _ in ranks):
            runs.look(time.monotonic())
            assert time.monotonic() < until
        ports = set().union(*(ports_of(rank.pid) for rank in ranks), {server.port})
        assert len(ports) >= 5  # the store, and a beacon and Gloo on each rank
        noise = (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 64, b"\xff" * 4096)
        open_to_the_end = []
        for port, text in itertools.product(sorted(ports), noise):
            stranger = socket.create_connection(("127.0.0.1", port), timeout=5)
            stranger.sendall(text)
            open_to_the_end.append(stranger)
        for rank in ranks:
            rank.join(60)
        assert [results.get(timeout=5) for _ in ranks] == [STEPS, STEPS]
        for stranger in open_to_the_end:
            stranger.close()
    finally:
        for rank in ranks:
            rank.kill()
