"""Ranks that call differently end with one ``ValueError``, and never mix up their messages."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import offbeat
from offbeat.comm.collectives import mean
from offbeat.comm.group import Group
from offbeat.comm.world import World
from offbeat.exchange import Algorithm
from offbeat.gradients import Compressed, Compressor
from offbeat.testing import ThreadWorld

SECONDS = 12.0


class Whole(Compressor):
    """Sends everything."""

    def __init__(self, like: Tensor, group: Group) -> None:
        self.sent, self.group = torch.zeros_like(like), group

    def launch(self, acc: Tensor) -> Tensor:
        self.handle = mean(self.sent.copy_(acc), self.group)
        return acc.clone()

    def wait(self) -> Tensor:
        self.handle.wait()
        return self.sent


NODES = ((0, 1), (2, 3))
GRADIENTS: dict[str, tuple[Algorithm, tuple[tuple[int, ...], ...]]] = {
    text: (offbeat.algorithm(text), ((0,), (1,)))
    for text in (
        "ddp",
        "ddp(wire='bf16')",
        "ddp(bucket_mb=1e-5)",
        "lags(density=0.5)",
        "slgs(density=0.1)",
    )
}
GRADIENTS["compressed"] = (Algorithm(gradients=Compressed(compressor=Whole)), ((0,), (1,), (2,)))
GRADIENTS["daso"] = (offbeat.daso(every=2, total_steps=40), NODES)
GRADIENTS["sgp in nodes"] = (offbeat.sgp("ring", within="local"), NODES)
GRADIENTS["partition"] = (offbeat.adasum(within="local", partition=True), NODES)
every_exchange = pytest.mark.parametrize("text", GRADIENTS)


@pytest.fixture(autouse=True)
def fast_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verdicts in tenths of a second."""
    monkeypatch.setattr("offbeat.comm.heartbeat.BEAT", 0.1)
    monkeypatch.setattr("offbeat.comm.heartbeat.SILENT_AFTER", 4.0)


def alike(work: Callable[[World], object], nodes: Any) -> str:
    """The text of the ``ValueError`` that every rank raises, in time."""

    def safe(world: World) -> Exception | None:
        try:
            work(world)
        except Exception as error:
            return error
        return None

    errors = ThreadWorld(nodes=nodes).run(safe, timeout=SECONDS)
    assert {type(error) for error in errors} == {ValueError}, errors
    texts = {str(error) for error in errors}
    assert len(texts) == 1, texts
    return texts.pop()


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


class Loop:
    """A training loop in pieces, so that a rank can make more or fewer of them."""

    def __init__(self, algorithm: Algorithm, world: World) -> None:
        self.model = small()
        self.replica = offbeat.replicate(self.model, algorithm, mesh=world)
        self.optimizer = SGD(self.replica.owned_parameters(), lr=0.01)
        self.world = world

    def backward(self) -> None:
        self.model(torch.full((3, 4), 1.0 + self.world.rank)).square().mean().backward()

    def step(self) -> None:
        self.optimizer.step()
        self.model.zero_grad()
        self.replica.step()


# ---- different numbers of backwards -------------------------------------------------------------


@every_exchange
@pytest.mark.fault(
    "a rank makes one backward more than the others in a step",
    "ValueError on all ranks; names a rank, its step and its number of backwards",
)
def test_an_additional_backward_on_one_rank(text: str) -> None:
    algorithm, nodes = GRADIENTS[text]

    def work(world: World) -> None:
        loop = Loop(algorithm, world)
        for step in range(8):
            loop.backward()
            if (world.rank, step) == (1, 3):
                loop.model.zero_grad()  # a second evaluation, as a line search makes
                loop.backward()
            loop.step()
        loop.replica.finish()

    said = alike(work, nodes)
    assert "backward 2 of step 3" in said
    assert "different numbers of backwards" in said


@pytest.mark.filterwarnings("ignore:rank .* gradients that were not exchanged:RuntimeWarning")
@every_exchange
@pytest.mark.fault(
    "set_requires_sync(False) on one rank in one step",
    "ValueError on all ranks; names a rank, its step and its number of backwards",
)
def test_a_backward_that_one_rank_does_not_exchange(text: str) -> None:
    algorithm, nodes = GRADIENTS[text]

    def work(world: World) -> None:
        loop = Loop(algorithm, world)
        for step in range(8):
            loop.replica.set_requires_sync((world.rank, step) != (1, 3))
            loop.backward()
            loop.step()
        loop.replica.finish()

    assert "of step 3" in alike(work, nodes)


@every_exchange
@pytest.mark.fault(
    "ranks make extra backwards in different steps, equally many in total",
    "ValueError on all ranks, in the first such step",
)
def test_equal_totals_of_backwards(text: str) -> None:
    algorithm, nodes = GRADIENTS[text]

    def work(world: World) -> None:
        loop = Loop(algorithm, world)
        for step in range(4):
            for _ in range(1 + (step % 2 == world.rank % 2)):
                loop.model.zero_grad()
                loop.backward()
            loop.step()
        loop.replica.finish()

    assert "backward 2 of step 0" in alike(work, nodes)


@pytest.mark.parametrize("end", ["finish", "consensus_distance", "state_dict and finish"])
@every_exchange
@pytest.mark.fault(
    "a rank makes one backward more in the last step, and the others finish",
    "ValueError on all ranks; names both calls",
)
def test_an_additional_backward_at_the_end(text: str, end: str) -> None:
    algorithm, nodes = GRADIENTS[text]

    def work(world: World) -> None:
        loop = Loop(algorithm, world)
        for _ in range(3):
            loop.backward()
            loop.step()
        if world.rank == 1:
            loop.backward()
        for verb in end.split(" and ") if world.rank != 1 else ("finish",):
            getattr(loop.replica, verb)()

    said = alike(work, nodes)
    assert "backward 1 of step 3" in said
    assert end.split()[-1] in said


def test_a_slow_rank_is_no_disagreement() -> None:
    """One that is past the exchange already, while others still wait for its last bytes."""

    def work(world: World) -> float:
        loop = Loop(offbeat.ddp(), world)
        for _ in range(3):
            loop.backward()
            if world.rank == 1:
                torch.ones(1).sum().item()
            loop.step()
        loop.replica.finish()
        return loop.model[0].weight.sum().item()

    assert len(set(ThreadWorld(3).run(work))) == 1


# ---- verbs in different order -------------------------------------------------------------------


def consensus(replica: offbeat.Replica) -> None:
    with replica.consensus():
        pass


def load(replica: offbeat.Replica) -> None:
    replica.load_state_dict(replica.state_dict())


VERBS: dict[str, Callable[[offbeat.Replica], object]] = {
    "finish": offbeat.Replica.finish,
    "consensus": consensus,
    "consensus_distance": offbeat.Replica.consensus_distance,
    "load_state_dict": load,
    "step": offbeat.Replica.step,
}


@pytest.mark.parametrize("text", ["ddp", "sgp", "sgp(overlap=1)", "adasum", "local_sgd(every=2)"])
@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(VERBS, 2)))
@pytest.mark.filterwarnings("ignore:rank .* a step.. without a backward:RuntimeWarning")
@pytest.mark.fault(
    "finish, consensus, consensus_distance, load_state_dict or step in different order",
    "ValueError on all ranks; names both calls",
)
def test_calls_in_different_order(text: str, one: str, other: str) -> None:
    def work(world: World) -> None:
        loop = Loop(offbeat.algorithm(text), world)
        for _ in range(3):
            loop.backward()
            loop.step()
        order = (one, other) if world.rank != 1 else (other, one)
        for verb in order:
            VERBS[verb](loop.replica)
        loop.replica.finish()

    said = alike(work, ((0,), (1,), (2,)))
    assert "(call 3)" in said or "different numbers of steps" in said
