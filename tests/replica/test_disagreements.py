"""Ranks that call differently end with one ``ValueError``, and never mix up their messages."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import offbeat
from offbeat.exchange import Algorithm
from offbeat.liveness.failure import Phase
from offbeat.liveness.heartbeats.diagnosis import Wait, find_fault
from offbeat.liveness.heartbeats.ring import Sign
from offbeat.methods import Compressed, Compressor
from offbeat.testing import ThreadWorld
from offbeat.transport.collectives import mean
from offbeat.transport.group import Group
from offbeat.transport.world import World
from outcomes import alike

pytestmark = pytest.mark.usefixtures("fast_heartbeat", "short_patience")

SECONDS = 30.0


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


@pytest.fixture
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some disagreements show only when a rank has waited for so long."""
    monkeypatch.setattr("offbeat.liveness.heartbeats.heartbeat.SILENT_AFTER", 4.0)


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

    said = alike(work, nodes=nodes, seconds=SECONDS)
    assert "backward 2 of step 3" in said
    assert "different numbers of backwards" in said
    assert "give all ranks equally many batches (drop_last=True" in said


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

    assert "of step 3" in alike(work, nodes=nodes, seconds=SECONDS)


@pytest.mark.parametrize("text", ["ddp", "lags(density=0.5)", "sgp in nodes"])
@pytest.mark.fault(
    "ranks make extra backwards in different steps",
    "ValueError on all ranks; in the first such step",
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

    assert "backward 2 of step 0" in alike(work, nodes=nodes, seconds=SECONDS)


@pytest.mark.parametrize(
    ("text", "end"),
    [
        *((text, "finish") for text in GRADIENTS),
        ("ddp", "consensus_distance"),
        ("slgs(density=0.1)", "state_dict and finish"),
    ],
)
@pytest.mark.fault(
    "a rank makes one backward more before finish()",
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

    said = alike(work, nodes=nodes, seconds=SECONDS)
    assert "backward 1 of step 3" in said
    assert end.split()[-1] in said


@pytest.mark.parametrize(
    ("other", "is_fault"),
    [
        (Phase(calls=3, verb="", exchanges=4), False),  # computes, and will come
        (Phase(calls=3, verb="backward", exchanges=4), False),  # in the one before
        (Phase(calls=3, verb="backward", exchanges=5), False),
        (Phase(calls=3, verb="step", exchanges=5), False),  # its part is on the way to us
        (Phase(calls=9, verb="finish", exchanges=9), False),
        (Phase(calls=3, verb="step", exchanges=4), True),
        (Phase(calls=4, verb="", exchanges=4), True),
        (Phase(calls=4, verb="backward", exchanges=4), True),
    ],
)
def test_a_slow_network_is_no_disagreement(other: Phase, is_fault: bool) -> None:
    """A rank that has taken part in the exchange may be far ahead of one that waits for it."""
    here = Phase(calls=3, verb="backward", steps=3, exchanges=5, turn=1)
    for members in ((0, 1), (0, 2)):
        wait = Wait(rank=0, phase=here, members=members, is_late=True)
        found = find_fault(Sign(rank=1, phase=other), wait)
        assert (found is not None) == (is_fault and 1 in members)


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


PAIRS = itertools.combinations(VERBS, 2)
TEXTS = itertools.cycle(["sgp(overlap=1)", "ddp", "local_sgd(every=2)"])


@pytest.mark.parametrize(
    ("one", "other", "text"), [(*pair, text) for pair, text in zip(PAIRS, TEXTS, strict=False)]
)
@pytest.mark.filterwarnings("ignore:rank .* a step.. without a backward:RuntimeWarning")
@pytest.mark.fault(
    "calls in different order",
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

    said = alike(work, size=3, seconds=SECONDS)
    assert "(call 3)" in said or "different numbers of steps" in said


@pytest.mark.fault(
    "a call of all ranks under `if rank == 0:`",
    "ValueError on all ranks; says so under all methods",
)
@pytest.mark.parametrize("text", ["ddp", "sgp"])
def test_a_call_under_if_rank_is_zero(text: str) -> None:
    def work(world: World) -> None:
        loop = Loop(offbeat.algorithm(text), world)
        for step in range(4):
            loop.backward()
            loop.step()
            if step == 1 and world.rank == 0:
                consensus(loop.replica)
        loop.replica.finish()

    said = alike(work, seconds=SECONDS)
    assert "rank == 0" in said if text == "ddp" else "in the same order" in said
    assert "consensus" in said


@pytest.mark.parametrize("verb", ["finish", "consensus"])
@pytest.mark.fault("replica.step() is never called", "a warning in finish() and consensus()")
def test_a_step_that_is_never_called(verb: str) -> None:
    def work(world: World) -> list[str]:
        model = small()
        optimizer = SGD(model.parameters(), lr=0.1)
        replica = offbeat.replicate(model, offbeat.sgp(), mesh=world)
        model(torch.ones(3, 4)).square().mean().backward()
        with replica.consensus():  # between two parts of a batch
            assert not replica.stats()["notes"]
        optimizer.step()
        VERBS[verb](replica)
        notes: list[str] = replica.stats()["notes"]
        replica.detach()
        return notes

    with pytest.warns(RuntimeWarning, match="step.. was never called"):
        found = ThreadWorld(2).run(work)
    for notes in found:
        assert any("call it after every optimizer.step()" in note for note in notes)


@pytest.mark.fault(
    "a rank of an elastic run finishes before the others",
    "ValueError on all ranks, once no loss can explain it; names the call",
)
def test_a_rank_of_an_elastic_run_finishes_before_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under a method whose steps do not wait, so that no step of another rank finds it."""
    monkeypatch.setattr("offbeat.liveness.heartbeats.heartbeat.SILENT_AFTER", 1.5)

    def work(world: World) -> None:
        model = small()
        recipe = offbeat.local_sgd(every=8)
        replica = offbeat.replicate(model, recipe, mesh=world, elastic=True)
        for _ in range(20 if world.rank else 6):
            model(torch.ones(3, 4)).square().mean().backward()
            replica.step()
        replica.finish()

    said = alike(work, seconds=SECONDS)
    assert "rank 1 has gone on to call 7, but rank 0 is in finish (call 6)" in said
