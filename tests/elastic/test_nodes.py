"""Nodes that are lost and come back: elastic runs of sgp(within="local"), in threads."""

import contextlib
import json
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.fsdp  # which replicate() imports: not in several threads at once
from torch.distributed import HashStore, TCPStore

import offbeat
from offbeat.attach import node_start
from offbeat.data import ElasticSampler
from offbeat.elastic.node import Node
from offbeat.liveness.store.client import TimedStore
from offbeat.testing import ThreadWorld, snapshot
from offbeat.transport.world import World
from problems import START, Quadratic, flat, gradient
from ranks import fork_server
from reference import members
from reference.participants import Array, Nodes

NODES = ((0, 1), (2, 3), (4, 5))
LR = 0.05
LEAVING: dict[str, Callable[[], members.Method]] = {
    "daso(every=4, wait=2)": lambda: members.Daso(START),
    "local_sgd(every=2, within='local')": lambda: members.LocalSgd(START),
    "sparse_loco(every=2, density=0.5, bits=None, within='local')": lambda: members.SparseLoco(
        START
    ),
    "noloco(every=2, within='local')": lambda: members.Noloco(START),
}


def node_gradient(node: int, x: Array, step: int) -> Array:
    return np.mean([gradient(rank, x, step) for rank in NODES[node]], axis=0)


def attach(world: World, more: str = "") -> offbeat.Replica:
    text = f"sgp({more}within='local')"
    return offbeat.replicate(Quadratic(), offbeat.algorithm(text), mesh=world, elastic=True)


def train(replica: offbeat.Replica, until: int, pause: float = 0.0) -> None:
    model, optimizer = replica.model, torch.optim.SGD(replica.model.parameters(), lr=LR)
    while replica.steps < until:
        time.sleep(pause)
        optimizer.zero_grad()
        model(replica.world.rank).backward()
        optimizer.step()
        replica.step()


def perish(replica: offbeat.Replica) -> None:
    """What remains of a process that dies is silence; a thread cannot be killed."""
    members = replica._members
    for links in (members.connection.links, members.node and members.node.links):
        if links:
            links.heartbeat._end_thread()


@pytest.mark.parametrize(
    ("more", "nodes"),
    [
        ("", ((0, 1), (2,), (3, 4, 5))),
        ("overlap=1, ", NODES),
        ("'ring', overlap=2, wire='bf16', ", ((0, 1), (2,), (3, 4, 5))),
    ],
    ids=str,
)
def test_without_losses_nodes_train_as_with_slices(
    more: str, nodes: tuple[tuple[int, ...], ...]
) -> None:
    """Whole models of first ranks, or a slice from each rank: the same method."""

    def work(world: World, elastic: bool) -> tuple[Array, Array]:
        algorithm = offbeat.algorithm(f"sgp({more}within='local')")
        replica = offbeat.replicate(Quadratic(), algorithm, mesh=world, elastic=elastic)
        train(replica, 12)
        trained = flat(snapshot(replica.model))
        with replica.consensus():
            shown = flat(snapshot(replica.model))
        replica.detach()
        return trained, shown

    ways = (partial(work, elastic=elastic) for elastic in (False, True))
    told = [ThreadWorld(nodes=nodes).run(way) for way in ways]
    # bf16 messages round what differs in the last bits of the sums.
    tolerance = 1e-2 if "bf16" in more else 1e-12
    for (slices, _), (whole, shown) in zip(*told, strict=True):
        np.testing.assert_allclose(whole, slices, rtol=0, atol=tolerance)
        np.testing.assert_array_equal(shown, told[1][0][1])


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("more", ["", "overlap=1, "])
@pytest.mark.parametrize("victims", [(3,), (2,), (2, 3)], ids=["another", "the first", "all"])
@pytest.mark.fault(
    "a rank is lost under within='local'",
    "PeerLost on its node; the other nodes train on",
)
def test_a_node_is_lost_with_any_of_its_ranks(victims: tuple[int, ...], more: str) -> None:
    def work(world: World) -> tuple[Array, dict[str, Any], list[int]] | Exception | None:
        replica, sizes = attach(world, more), list[int]()
        replica.follow(lambda: sizes.append(replica.world.size))
        train(replica, 2)
        if world.rank in victims:
            perish(replica)
            return None
        try:
            train(replica, 12)
        except offbeat.PeerLost as loss:
            replica.detach()
            return loss
        replica.finish()
        result = flat(snapshot(replica.model)), replica.stats(), sizes
        replica.detach()
        return result

    results = ThreadWorld(nodes=NODES).run(work)
    for rank, found in enumerate(results):
        if rank in NODES[1]:
            assert found is None if rank in victims else isinstance(found, offbeat.PeerLost)
            continue
        assert isinstance(found, tuple)
        end, stats, sizes = found
        assert sizes == [4]
        assert np.array_equal(end, results[0][0])
        assert [(loss["node"], loss["rank"]) for loss in stats["lost"]] == [(1, 2), (1, 3)]
        assert (stats["size"], stats["rank"], stats["step"]) == (4, rank, 12)


@pytest.mark.usefixtures("impatient")
def test_a_node_that_ends_in_a_gather_is_not_waited_for() -> None:
    """Whose other rank lives on, and does not detach."""
    over = threading.Barrier(5)

    def work(world: World) -> list[str] | None:
        replica = attach(world)
        train(replica, 2)
        if world.rank == 3:
            perish(replica)
            return None
        try:
            return replica.gather(str(world.rank))
        except offbeat.PeerLost:
            return None
        finally:
            over.wait(30)
            replica.detach()

    told = ThreadWorld(nodes=NODES).run(work)
    assert told == [["0", "1", "4", "5"]] * 2 + [None] * 2 + [["0", "1", "4", "5"]] * 2


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("more", ["", "overlap=1, "])
@pytest.mark.fault(
    "a node is lost and starts again",
    "it joins",
    group="Ranks that join",
)
def test_a_node_returns(more: str, draws: random.Random) -> None:
    pause = draws.choice([0.0, 0.01])

    def work(world: World) -> tuple[Array, float, dict[str, Any]]:
        replica = attach(world, more)
        train(replica, 3)
        if world.rank in NODES[1]:
            perish(replica)
            time.sleep(draws.uniform(0, 0.3))  # one of its ranks starts before the other
            replica = attach(world, more)
        until = time.monotonic() + 40
        while not replica.joined:
            assert time.monotonic() < until, replica.lost
            train(replica, replica.steps + 1, pause)
        train(replica, replica.joined[-1]["step"] + 20, 0.002)
        weight = replica.parameters.weight if world.rank % 2 == 0 else 0.0
        replica.finish()
        result = flat(snapshot(replica.model)), weight, replica.stats()
        replica.detach()
        return result

    results = ThreadWorld(nodes=NODES).run(work)
    for rank, (end, _, stats) in enumerate(results):
        assert np.array_equal(end, results[0][0])
        assert [(join["node"], join["rank"]) for join in stats["joined"]] == [(1, 2), (1, 3)]
        assert [(loss["node"], loss["rank"]) for loss in stats["lost"]] == [(1, 2), (1, 3)]
        assert (stats["size"], stats["rank"]) == (6, rank)
    if not more:  # nothing is in flight: two began with one each, and gave the third of theirs
        assert sum(weight for _, weight, _ in results) == pytest.approx(2, abs=1e-12)


class Gone(Exception):
    """Ends a thread that plays a process which has died."""


@pytest.mark.usefixtures("impatient")
@pytest.mark.fault(
    "a rank of a node is lost when another of its ranks has joined already",
    "PeerLost on its node; the other nodes train on",
    group="Ranks that join",
)
def test_a_node_is_lost_as_it_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = Node.copy_state

    def copy_state(node: Node, state: dict[str, Any]) -> dict[str, Any]:
        if node.world.rank == 3:
            assert node.links is not None
            node.links.heartbeat._end_thread()
            raise Gone
        return copy(node, state)

    monkeypatch.setattr(Node, "copy_state", copy_state)

    def work(world: World) -> list[int]:
        replica = attach(world)
        train(replica, 3)
        if world.rank in NODES[1]:
            perish(replica)
            with pytest.raises(Gone if world.rank == 3 else offbeat.PeerLost):
                attach(world)
            return []
        until = time.monotonic() + 40
        while len(replica.lost) < 4:
            assert time.monotonic() < until, replica.lost
            train(replica, replica.steps + 1, 0.005)
        train(replica, replica.lost[-1]["step"] + 5)
        replica.finish()
        replica.detach()
        return [loss["rank"] for loss in replica.lost]

    results = ThreadWorld(nodes=NODES).run(work)
    assert [results[rank] for rank in (0, 1, 4, 5)] == 4 * [[2, 3, 2, 3]]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "text",
    [
        "daso(every=4, wait=2)",
        "daso(every=2, total_steps=1000, warmup_steps=900, wire='bf16')",
        "local_sgd(every=2, within='local')",
        "adasum(within='local')",
        "diloco(every=4, fragments=2, delay=1, within='local')",
        "sparse_loco(every=2, density=0.5, within='local')",
        "noloco(every=2, within='local')",
    ],
)
@pytest.mark.fault(
    "a node is lost and starts again under any recipe",
    "it gets model, optimizer, schedule and shared state, bit for bit",
    group="Ranks that join",
)
def test_a_node_is_healed_as_one(text: str) -> None:
    def work(world: World) -> tuple[Array, Array, Array, dict[str, Any]]:
        def start() -> tuple[offbeat.Replica, torch.optim.Optimizer]:
            model = Quadratic()
            optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
            given: dict[str, Any] = {"mesh": world, "optimizer": optimizer, "elastic": True}
            return offbeat.replicate(model, offbeat.algorithm(text), **given), optimizer

        def step() -> None:
            time.sleep(0.01)
            optimizer.zero_grad()
            replica.model(world.rank).backward()
            optimizer.step()
            replica.step()

        replica, optimizer = start()
        for _ in range(3):
            step()
        if world.rank in NODES[1]:
            perish(replica)
            replica, optimizer = start()
        until = time.monotonic() + 40
        while not replica.joined:
            assert time.monotonic() < until, replica.lost
            step()
        while replica.steps < replica.joined[-1]["step"] + 9:
            step()
        own = flat(snapshot(replica.model))
        velocity = optimizer.state[replica.model.vector]["momentum_buffer"].numpy().copy()
        replica.finish()
        result = own, velocity, flat(snapshot(replica.model)), replica.stats()
        replica.detach()
        return result

    results = ThreadWorld(nodes=NODES).run(work)
    for first, second in NODES:
        for one, other in zip(results[first][:2], results[second][:2], strict=True):
            np.testing.assert_array_equal(one, other)
    for _, _, end, stats in results:
        np.testing.assert_array_equal(end, results[0][2])
        assert [(join["node"], join["rank"]) for join in stats["joined"]] == [(1, 2), (1, 3)]
        assert [(loss["node"], loss["rank"]) for loss in stats["lost"]] == [(1, 2), (1, 3)]
        assert np.isfinite(end).all()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("text", LEAVING)
@pytest.mark.fault(
    "a rank of a node leaves (leave())",
    "its node leaves with it; the others do not wait",
    group="Leaving",
)
def test_a_node_leaves_with_any_of_its_ranks(text: str) -> None:
    last = list[int]()

    def work(world: World) -> tuple[Array, list[list[int]], dict[str, Any]]:
        model = Quadratic()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.5)
        given: dict[str, Any] = {"mesh": world, "optimizer": optimizer, "elastic": True}
        replica = offbeat.replicate(model, offbeat.algorithm(text), **given)
        sampler = iter(ElasticSampler(10_000, 4, replica))
        batches = list[list[int]]()
        while not last or replica.steps < last[0]:
            # The others hear of the request in their step(), in which they wait for this node.
            time.sleep(0.01 if world.node else 0.1)
            batches.append(next(sampler))
            optimizer.zero_grad()
            model(world.rank).backward()
            optimizer.step()
            replica.step()
            if (replica.steps, world.rank) == (5, 3):
                replica.leave()
            if replica.has_left:
                return flat(snapshot(model)), batches, {}
            if replica.lost and not last:
                last.append(replica.lost[0]["step"] + 8)
        own, stats = flat(snapshot(model)), replica.stats()
        replica.finish()
        replica.detach()
        return own, batches, stats

    results = ThreadWorld(nodes=NODES).run(work)
    lost = results[0][2]["lost"]
    assert [(loss["node"], loss["rank"], loss["left"]) for loss in lost] == [(1, 2, 1), (1, 3, 1)]
    expected = members.train(
        LEAVING[text](), node_gradient, ranks=range(3), steps=last[0], lr=LR, momentum=0.5,
        leaves={lost[0]["step"] + 1: 1},
    )  # fmt: skip
    for node in (0, 2):
        for rank in NODES[node]:
            own, _, stats = results[rank]
            np.testing.assert_allclose(own, expected[node], rtol=0, atol=1e-12)
            assert (stats["lost"], stats["size"], stats["step"]) == (lost, 4, last[0])
    np.testing.assert_array_equal(*(results[rank][0] for rank in NODES[1]))
    counts = [lost[0]["used"] if stats == {} else None for *_, stats in results]
    kept = [batches[:count] for (_, batches, _), count in zip(results, counts, strict=True)]
    used = [sample for batches in kept for batch in batches for sample in batch]
    assert len(used) == len({*used})
    assert lost[0]["used"] == lost[0]["step"] + 1 or "wait" in text  # what is in flight


@pytest.mark.usefixtures("impatient")
def test_nodes_leave_to_the_last_one() -> None:
    """Both ranks of one ask, then the only rank of the other one."""

    def work(world: World) -> list[int]:
        replica = attach(world)
        steps = list[int]()
        for node in (0, 1):
            if world.node == node:
                replica.leave()
            until = time.monotonic() + 40
            while not replica.has_left and len(replica.lost) <= node:
                assert time.monotonic() < until
                train(replica, replica.steps + 1, 0.005)
            steps.append(replica.steps)
            if replica.has_left:
                break
        return steps

    first, second, third = ThreadWorld(nodes=((0, 1), (2,))).run(work)
    assert first == second == third[:1]


@pytest.mark.usefixtures("impatient")
@pytest.mark.fault(
    "a node is lost and comes back in an epoch",
    "each sample is used once",
)
@pytest.mark.parametrize("text", ["local_sgd(every=2, within='local')", "sgp(within='local')"])
def test_each_sample_once_with_a_node_that_returns(text: str) -> None:
    length = 3000

    def work(world: World) -> list[int]:
        def start() -> tuple[offbeat.Replica, ElasticSampler]:
            algorithm = offbeat.algorithm(text)
            replica = offbeat.replicate(Quadratic(), algorithm, mesh=world, elastic=True)
            return replica, ElasticSampler(length, 4, replica)

        replica, sampler = start()
        used: list[tuple[int, list[int]]] = []
        early: list[tuple[int, list[int]]] = []  # of a node that is lost
        batches = iter(sampler)
        while batch := next(batches, None):
            time.sleep(0.01)
            replica.model(world.rank).backward()
            replica.model.zero_grad()
            used.append((replica.steps, batch))
            replica.step()
            if world.rank in NODES[1] and replica.steps == 5 and not early:
                perish(replica)
                early, used = used, []
                replica, sampler = start()
                batches = iter(sampler)
        replica.finish()
        assert sampler.stats()["left"] == sampler.stats()["repeated"] == 0
        losses = {loss["rank"]: loss["used"] for loss in replica.lost}
        assert set(losses) == set(NODES[1])
        assert {join["rank"] for join in replica.joined} == set(NODES[1])
        replica.detach()
        kept = [batch for step, batch in early if step < losses[world.rank]]
        return [sample for batch in [*kept, *(batch for _, batch in used)] for sample in batch]

    ranks = ThreadWorld(nodes=NODES).run(work)
    assert sorted(sample for samples in ranks for sample in samples) == [*range(length)]


@pytest.mark.processes
@pytest.mark.fault(
    "a process of a node is killed, and the node starts again",
    "it joins",
    group="Ranks that join",
)
@pytest.mark.parametrize("text", ["sgp(overlap=1, within='local')", "daso(every=4)"])
def test_processes_of_a_node_return(text: str) -> None:
    from bench.scale.worker import work

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("words", "")

    def start(rank: int) -> BaseProcess:
        args = (store.port, 6, rank, 1, text, 2)
        process: BaseProcess = fork_server().Process(target=work, args=args, daemon=True)
        process.start()
        return process

    def said(kind: str, count: int, seconds: float = 60.0) -> list[list[Any]]:
        until = time.monotonic() + seconds
        while True:
            lines = map(json.loads, store.get("words").decode().splitlines())
            words = [word for word in lines if word[0] == kind]
            if len(words) >= count:
                return words
            assert time.monotonic() < until, words
            time.sleep(0.1)

    running = {rank: start(rank) for rank in range(6)}
    said("in", 6)
    running[2].kill()
    running[3].join(60)
    assert running[3].exitcode == 1, "PeerLost: a rank of its node is lost"
    running |= {rank: start(rank) for rank in (3, 2)}
    said("in", 8)
    store.set("last", str(int(store.get("step")) + 100))
    ends = said("out", 6)
    for process in running.values():
        process.join(10)
    assert {rank for _, rank, *_ in ends} == {*range(6)}
    assert all(model == ends[0][2] for _, _, model, *_ in ends)
    for _, _, _, stats, *_ in ends:
        assert [(join["node"], join["rank"]) for join in stats["joined"]] == [(1, 2), (1, 3)]
        assert [(loss["node"], loss["rank"]) for loss in stats["lost"]] == [(1, 2), (1, 3)]


@pytest.mark.usefixtures("impatient")
def test_a_node_that_does_not_fit_is_told_so() -> None:
    """Its ranks raise alike; the others do not notice it."""

    def work(world: World) -> str:
        replica = attach(world)
        train(replica, 3)
        said = ""
        if world.rank in NODES[1]:
            perish(replica)
            with pytest.raises(ValueError, match="cannot join") as refused:
                attach(world, "'ring', ")
            said = str(refused.value)
            replica = attach(world)
        while not replica.joined:
            train(replica, replica.steps + 1, 0.005)
        train(replica, replica.joined[-1]["step"] + 20)
        replica.finish()
        replica.detach()
        return said

    said = ThreadWorld(nodes=NODES).run(work)
    assert said[2] == said[3]
    assert "algorithm" in said[2]


def test_a_graph_that_nodes_cannot_have_is_refused_on_all_ranks() -> None:
    def work(world: World) -> str:
        with pytest.raises(ValueError, match="pairs need an even number") as refused:
            attach(world, "'bipartite', ")
        return str(refused.value)

    assert len({*ThreadWorld(nodes=NODES).run(work)}) == 1


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize(
    ("model", "said"),
    [
        ([1, 2], "expected a torch.nn.Module"),
        (torch.nn.Linear(2, 2), "use the same versions, model"),
    ],
    ids=["none", "another"],
)
def test_a_wrong_model_on_one_rank_is_refused_on_all(model: Any, said: str, rank: int) -> None:
    def work(world: World) -> str:
        algorithm = offbeat.sgp(within="local")
        given = model if world.rank == rank else Quadratic()
        with pytest.raises(ValueError, match=said) as refused:
            offbeat.replicate(given, algorithm, mesh=world, elastic=True)
        return str(refused.value)

    assert len({*ThreadWorld(nodes=((0, 1), (2, 3))).run(work)}) == 1


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("rank", [2, 3])
def test_a_wrong_model_on_one_rank_that_returns_is_refused_on_its_node(rank: int) -> None:
    are_refused, last = {2: threading.Event(), 3: threading.Event()}, list[int]()

    def work(world: World) -> str:
        replica, said = attach(world), ""
        if world.rank in NODES[1]:
            perish(replica)
            algorithm = offbeat.sgp(within="local")
            given = torch.nn.Linear(2, 2) if world.rank == rank else Quadratic()
            with pytest.raises(ValueError, match="of a node differ in model") as refused:
                offbeat.replicate(given, algorithm, mesh=world, elastic=True)
            are_refused[world.rank].set()
            return str(refused.value)
        # Once the run is over there is none to be refused by: the node would begin another one.
        while not last or replica.steps < last[0]:
            if world.rank == 0 and not last and all(e.is_set() for e in are_refused.values()):
                last.append(replica.steps + 10)  # rank 1 is not that far ahead
            train(replica, replica.steps + 1, 0.005)
        assert {loss["node"] for loss in replica.lost} == {1}
        replica.finish()
        replica.detach()
        return said

    said = ThreadWorld(nodes=NODES).run(work)
    assert said[2] == said[3]


@pytest.mark.parametrize("rank", [0, 3])
def test_a_fault_of_one_rank_is_raised_on_all(rank: int, tmp_path: Path) -> None:
    def work(world: World) -> str:
        replica = attach(world)
        word = "a bad word" if world.rank == rank else "1"
        part: Any = SimpleNamespace(state_dict=lambda: {"word": int(word)})
        with pytest.raises(ValueError, match="a bad word") as said:
            offbeat.save_per_rank(tmp_path, replica=replica, part=part)
        train(replica, 2)
        replica.finish()
        replica.detach()
        return str(said.value)

    assert all(f"rank {rank}: cannot save" in said for said in ThreadWorld(nodes=NODES).run(work))


@pytest.mark.usefixtures("fast_heartbeat")
@pytest.mark.parametrize("nodes", [NODES, ((0,), (1, 2), (3,))])
def test_an_error_that_is_known_before_a_step_is_raised_on_all(nodes: Nodes) -> None:
    """The first rank of a node hears of it before the call that the others make too."""

    def work(world: World) -> str:
        replica = attach(world)
        train(replica, 3)
        links = replica._members.connection.links
        if world.rank == 2:
            with torch.no_grad():
                replica.model.vector[1] = torch.nan
        while world.rank == 0 and links is not None and not links.heartbeat.has_agreed_error:
            time.sleep(0.01)
        with pytest.raises(ValueError, match="not finite") as error:
            train(replica, 9)
        replica.detach()
        return str(error.value)

    assert len(set(ThreadWorld(nodes=nodes).run(work))) == 1


def test_saved_parts_are_loaded(tmp_path: Path) -> None:
    def work(world: World) -> tuple[int, Array, Array]:
        replica = attach(world, "overlap=1, ")
        train(replica, 4)
        offbeat.save_per_rank(tmp_path, replica=replica)
        saved = flat(snapshot(replica.model))
        train(replica, 9)
        assert offbeat.load_per_rank(tmp_path, replica=replica)
        found = replica.steps, saved, flat(snapshot(replica.model))
        replica.detach()
        return found

    for steps, saved, loaded in ThreadWorld(nodes=NODES).run(work):
        assert steps == 4
        np.testing.assert_array_equal(saved, loaded)


@pytest.mark.parametrize("unfit", [4, 5])
def test_a_saved_state_is_loaded(unfit: int) -> None:
    def work(world: World) -> tuple[Array, Array, str]:
        replica = attach(world, "overlap=1, ")
        train(replica, 4)
        saved = {n: t.clone() for n, t in replica.model.state_dict().items()}, replica.state_dict()
        train(replica, 9)
        went_on = flat(snapshot(replica.model))
        replica.model.load_state_dict(saved[0])
        replica.load_state_dict(saved[1])
        assert replica.steps == 4
        train(replica, 9)
        resumed = flat(snapshot(replica.model))
        broken = {name: entry | {"steps": 3} for name, entry in saved[1].items()}
        with pytest.raises(ValueError, match="step") as error:
            replica.load_state_dict(broken if world.rank == unfit else saved[1])
        assert replica.steps == 9, "nobody has loaded"
        replica.detach()
        return went_on, resumed, str(error.value)

    ranks = ThreadWorld(nodes=NODES).run(work)
    for went_on, resumed, _ in ranks:
        np.testing.assert_array_equal(went_on, resumed)
    assert {text[-60:] for *_, text in ranks} == {ranks[unfit][2][-60:]}
    assert all(len({ranks[rank][2] for rank in node}) == 1 for node in NODES)


def test_processes_of_a_node_that_were_started_together_meet() -> None:
    """Those of earlier starts have left their words in the store."""
    store, results = HashStore(), dict[str, int]()
    clients: dict[str, TimedStore] = {}

    def come(name: str, rank: int) -> threading.Thread:
        clients[name] = TimedStore(store)

        def enter() -> None:
            with contextlib.suppress(RuntimeError):  # the client is closed
                results[name] = node_start.meet(clients[name], rank, (4, 5, 6))

        thread = threading.Thread(target=enter, daemon=True)
        thread.start()
        return thread

    def all_come(*threads: threading.Thread) -> None:
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()

    all_come(come("a", 4), come("b", 5), come("c", 6))
    assert results["a"] == results["b"] == results["c"]
    early = come("d", 5)
    time.sleep(0.2)
    assert early.is_alive(), "it waits for the successors of the others"
    ended = come("e", 6)
    time.sleep(0.2)
    clients["e"].close()
    all_come(ended, early, come("f", 4), come("g", 6))
    assert results["d"] == results["f"] == results["g"] != results["a"]
    assert "e" not in results, "it ended before the others came"
    for client in clients.values():
        client.close()


def test_a_new_node_takes_the_number_that_it_gets() -> None:
    """Another new one was first, and has the number that both had guessed."""
    node = Node.meet(World.at(HashStore(), size=2))
    assert node.world.rank == 2
    node.go_on([0, 1, 2, 3], own=3)
    assert (node.world.rank, node.world.ranks) == (3, (0, 1, 2, 3))
    node.go_on([0, 3], own=3)
    assert (node.world.rank, node.world.lost) == (3, (1, 2))


def test_all_ranks_of_a_node_hear_of_a_new_one() -> None:
    def work(world: World) -> tuple[int, ...]:
        node = Node.meet(world)
        if node.is_first:
            node.go_on([0, 1], own=0)
        node.together("gather", lambda: None, ([], []), [])
        node.close()
        return node.world.ranks

    assert ThreadWorld(nodes=((0, 1),)).run(work) == [(0, 1, 2), (0, 1, 2)]


def test_caches_of_a_node_stay_as_its_ranks_have_them() -> None:
    """Where another rank has seen a longer sequence; other buffers are those of the first one."""

    def work(world: World) -> tuple[list[float], float]:
        model = Quadratic()
        model.register_buffer("cache", torch.zeros(2), persistent=False)
        model.register_buffer("seen", torch.tensor(float(world.rank)))
        algorithm = offbeat.algorithm("sgp(within='local')")
        replica = offbeat.replicate(model, algorithm, mesh=world, elastic=True)
        model.cache = torch.full((2 + world.rank,), float(world.rank))
        model.seen.add_(world.rank)
        replica.finish()
        replica.detach()
        return model.cache.tolist(), float(model.seen)

    found = ThreadWorld(nodes=((0, 1), (2, 3))).run(work)
    assert [cache for cache, _ in found] == [[rank] * (2 + rank) for rank in range(4)]
    assert [seen for _, seen in found] == [1.0] * 4  # the mean of 0 and 2, those of first ranks
