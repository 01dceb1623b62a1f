"""Nodes that shard a model by FSDP2 are lost and come back: real processes."""

import json
import os
import time
import warnings
import zlib
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import offbeat
from offbeat.elastic import joining
from offbeat.liveness.heartbeats import heartbeat
from ranks import fork_server

# Alone: eight processes that wait for each other are late beside other tests.
pytestmark = [pytest.mark.processes, pytest.mark.quiet]

NODES = ((0, 1), (2, 3), (4, 5))
PATIENCE = {"BEAT": 0.3, "BROKEN_AFTER": 2.0, "SILENT_AFTER": 5.0}


class Probe:
    """A digest of the optimizer's state, which a node that joins compares with its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.is_equal = optimizer, False

    def state_dict(self) -> dict[str, Any]:
        digest = 0
        for state in self.optimizer.state.values():
            for value in state.values():
                part = value.to_local() if hasattr(value, "to_local") else value
                digest = zlib.crc32(part.numpy().tobytes(), digest)
        return {"digest": digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.is_equal = state == self.state_dict()


def work(port: int, rank: int, start: int, text: str, dies: bool) -> None:
    """Train as one rank; ``dies``: it does so as the state is handed over to it."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name, value in PATIENCE.items():
        setattr(heartbeat, name, value)
    if dies:
        joining.take = lambda *_: os._exit(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    node = PrefixStore(f"node {rank // 2}, start {start}", store)
    dist.init_process_group("gloo", store=node, rank=rank % 2, world_size=2)
    torch.manual_seed(start)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 1)).double()
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    world = offbeat.World.at(f"127.0.0.1:{port}", size=6, rank=rank, ranks_per_node=2)
    given: dict[str, Any] = {"mesh": world, "optimizer": optimizer, "elastic": True}
    replica = offbeat.replicate(model, offbeat.algorithm(text), **given)
    probe = Probe(optimizer)
    replica.register("probe", probe)
    say(store, "in", rank, probe.is_equal)
    last = None
    while last is None or replica.steps < last:
        time.sleep(0.005)
        x = torch.randn(8, 5, dtype=torch.float64)
        if replica.steps % 5 == 0:  # a rank may be lost in these, too
            with replica.consensus():
                model(x)
            assert replica.state_dict()
        optimizer.zero_grad()
        (model(x).squeeze() - x.sum(1)).square().mean().backward()
        replica.clip_grad_norm_(10.0)  # the ranks of a node wait for each other
        optimizer.step()
        replica.step()
        if store.check([f"leave {rank}"]):
            replica.leave()
        if replica.has_left:
            break
        if last is None:
            store.set(f"steps {rank}", str(replica.steps))
            last = int(store.get("last")) if store.check(["last"]) else None
    weight = getattr(replica.parameters, "weight", 1.0)
    if not replica.has_left:
        replica.finish()
    shards = {n: p.to_local().tolist() for n, p in model.named_parameters()}
    say(store, "out", rank, shards, replica.stats() | {"weight": weight})
    replica.detach()
    dist.destroy_process_group()


def say(store: TCPStore, *word: object) -> None:
    store.append("words", json.dumps(word) + "\n")


class Run:
    """Six processes on three nodes, whose processes are ended and started by the test."""

    def __init__(self, text: str) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.store.set("words", "")
        self.text, self.starts = text, 0
        self.running: dict[int, BaseProcess] = {}

    def start(self, *ranks: int, dies: int | None = None) -> None:
        for rank in ranks:
            args = self.store.port, rank, self.starts, self.text, rank == dies
            self.running[rank] = fork_server().Process(target=work, args=args, daemon=True)
            self.running[rank].start()
        self.starts += 1

    def said(self, kind: str, count: int, seconds: float = 60.0) -> list[list[Any]]:
        until = time.monotonic() + seconds
        while True:
            lines = map(json.loads, self.store.get("words").decode().splitlines())
            words = [word for word in lines if word[0] == kind]
            if len(words) >= count:
                return words
            assert time.monotonic() < until, words
            time.sleep(0.05)

    def goes_on(self, rank: int, seconds: float = 60.0) -> int:
        """Wait for ten more steps of ``rank``."""
        first, until = int(self.store.get(f"steps {rank}")), time.monotonic() + seconds
        while (steps := int(self.store.get(f"steps {rank}"))) < first + 10:
            assert time.monotonic() < until
            time.sleep(0.05)
        return steps

    def ended(self, *ranks: int) -> None:
        for rank in ranks:
            self.running[rank].join(60)
            assert self.running[rank].exitcode not in (None, 0)


@pytest.mark.fault(
    "a rank of a node that shards a model is killed, and one as the node starts again",
    "its node joins: shards and optimizer from its counterparts, bit for bit",
    group="Ranks that join",
)
@pytest.mark.parametrize("text", ["ddp", "diloco(every=4, fragments=2, delay=1)"])
def test_a_node_that_shards_a_model_is_lost_and_healed_as_one(text: str) -> None:
    run = Run(text)
    run.start(*range(6))
    run.said("in", 6)
    run.goes_on(0)
    run.running[3].kill()
    run.ended(3, 2)
    run.goes_on(0)
    run.start(2, 3, dies=3)
    run.ended(3, 2)
    run.goes_on(5)
    run.start(3, 2)
    joined = run.said("in", 8)[6:]
    assert sorted(joined) == [["in", 2, True], ["in", 3, True]], "Adam's state, bit for bit"
    run.store.set("last", str(run.goes_on(2) + 20))
    ends = {rank: (shards, stats) for _, rank, shards, stats in run.said("out", 6)}
    for rank, (shards, stats) in ends.items():
        assert shards == ends[rank % 2][0]
        assert {join["rank"] for join in stats["joined"]} == {2, 3}
        assert {loss["rank"] for loss in stats["lost"]} == {2, 3}
        assert (stats["size"], stats["rank"]) == (6, rank)
    for process in run.running.values():
        process.join(10)


@pytest.mark.fault(
    "a rank of a node that shards a model leaves",
    "its node leaves with it; the others do not wait",
    group="Leaving",
)
@pytest.mark.parametrize("text", ["lags(density=0.3)", "sgp"])
def test_a_node_that_shards_a_model_leaves(text: str) -> None:
    run = Run(text)
    run.start(*range(6))
    run.said("in", 6)
    run.goes_on(0)
    run.store.set("leave 3", "")
    gone = {rank for _, rank, *_ in run.said("out", 2)}
    assert gone == {2, 3}
    for rank in gone:
        run.running[rank].join(60)
        assert run.running[rank].exitcode == 0
    run.store.set("last", str(run.goes_on(0) + 20))
    ends = {rank: (shards, stats) for _, rank, shards, stats in run.said("out", 6)}
    for rank in {*range(6)} - gone:
        shards, stats = ends[rank]
        assert shards == ends[rank % 2][0]
        assert [(loss["rank"], loss["left"]) for loss in stats["lost"]] == [(2, 1), (3, 1)]
        assert (stats["size"], stats["rank"]) == (4, rank)
    mass = sum(ends[rank][1]["weight"] for rank in (0, 4))
    assert mass == pytest.approx(3 if text == "sgp" else 2, abs=1e-12)
    for process in run.running.values():
        process.join(10)
