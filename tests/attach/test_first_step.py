"""The first step finds ranks that started from other parameters, and a second wrapper."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import offbeat
from offbeat.testing import ThreadWorld
from offbeat.transport.world import World
from problems import seeded
from ranks import Spawned

pytestmark = pytest.mark.usefixtures("fast_heartbeat")

NODES = ((0, 1), (2, 3))


def small(seed: int) -> nn.Sequential:
    return seeded(seed, lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)))


def train(replica: offbeat.Replica, rank: int, steps: int = 2) -> None:
    optimizer = SGD(replica.owned_parameters(), lr=0.05)
    for _ in range(steps):
        replica.model(torch.full((3, 4), 1.0 + rank)).square().mean().backward()
        optimizer.step()
        replica.model.zero_grad()
        replica.step()


def outcome(text: str, odd: int, saved: dict[int, Any] | None = None) -> list[Any]:
    """Every rank's error, or its notes, where rank ``odd`` alone loads another model's file."""
    file, other = small(1).state_dict(), small(2).state_dict()

    def work(world: World) -> Any:
        model = small(0)
        replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world)
        model.load_state_dict(other if world.rank == odd else file)
        if saved is not None:
            replica.load_state_dict(saved[world.rank])
        try:
            train(replica, world.rank)
        except ValueError as error:
            return str(error)
        notes: list[str] = replica.stats()["notes"]
        replica.finish()
        return notes

    return ThreadWorld(nodes=NODES).run(work)


KEPT_EQUAL = ["ddp", "lags(density=0.5)", "slgs(density=0.5)", "adasum", "adasum(within='local')"]
IN_A_NODE = ["daso(every=2, total_steps=20)", "sgp('ring', within='local')"]
MAY_DIFFER = ["sgp", "local_sgd(every=2)", "d_psgd"]


@pytest.mark.parametrize("text", [*KEPT_EQUAL, *IN_A_NODE])
@pytest.mark.fault(
    "a rank loads another model file, or forgets to",
    "ValueError on all ranks in the first step, where the method keeps ranks equal",
)
def test_one_rank_starts_from_another_file(text: str) -> None:
    said = outcome(text, odd=1)
    assert len(set(map(str, said))) == 1
    assert "ranks 0 and 1 started from different parameters" in said[0]


@pytest.mark.parametrize("text", MAY_DIFFER)
@pytest.mark.fault(
    "a rank loads another model file under sgp, local_sgd or d_psgd",
    "a note in stats(); training averages the models",
)
def test_a_note_where_ranks_may_differ(text: str) -> None:
    for notes in outcome(text, odd=1):
        assert "ranks 0 and 1 started from different parameters" in notes[-1]


@pytest.mark.parametrize("text", IN_A_NODE)
def test_nodes_may_differ(text: str) -> None:
    """Both ranks of the second node load the other file."""
    files = [small(1).state_dict(), small(2).state_dict()]

    def work(world: World) -> list[str]:
        model = small(0)
        replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world)
        model.load_state_dict(files[world.node])
        train(replica, world.rank)
        notes: list[str] = replica.stats()["notes"]
        return notes

    for notes in ThreadWorld(nodes=NODES).run(work):
        assert "ranks 0 and 2 started" in notes[-1]


@pytest.mark.parametrize("text", ["ddp", "lags(density=0.5)", "adasum", IN_A_NODE[0]])
@pytest.mark.fault(
    "a rank resumes from another model file, or forgets to load it",
    "ValueError on all ranks in the next step; parameters in the replica's state are loaded",
)
def test_one_rank_resumes_from_another_file(text: str) -> None:
    """The state of ``ddp`` and ``lags`` holds no parameters, that of the others does."""
    start = small(0)

    def work(world: World) -> Any:
        replica = offbeat.replicate(copy.deepcopy(start), offbeat.algorithm(text), mesh=world)
        train(replica, world.rank)
        state = replica.state_dict()
        replica.detach()
        return state

    said = outcome(text, odd=3, saved=dict(enumerate(ThreadWorld(nodes=NODES).run(work))))
    if text in ("ddp", "lags(density=0.5)"):
        assert all("ranks 0 and 3 started from different parameters" in text for text in said)
    else:
        assert said == [[]] * 4


@pytest.mark.parametrize("text", ["ddp", "lags(density=0.5)"])
@pytest.mark.fault(
    "a rank resumes without its optimizer's state",
    "RuntimeWarning from finish(), where the method keeps ranks equal",
)
def test_replicas_that_have_drifted_apart(text: str) -> None:
    def work(world: World) -> list[str]:
        model = small(0)
        replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world)
        optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9 if world.rank == 1 else 0.0)
        for _ in range(3):
            model(torch.ones(3, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
        replica.finish()
        notes: list[str] = replica.stats()["notes"]
        return notes

    with pytest.warns(RuntimeWarning, match="keeps them equal"):
        said = ThreadWorld(2).run(work)
    assert all("finish() found replicas at distances up to" in notes[-1] for notes in said)


def test_equal_starts_leave_no_note() -> None:
    for text in (*KEPT_EQUAL, *MAY_DIFFER, *IN_A_NODE):
        notes = [note for notes in outcome(text, odd=-1) for note in notes]
        assert not [note for note in notes if "started" in note]


def _wrap_after_replicate(rank: int, results: Any, text: str) -> None:
    model = nn.Linear(8, 1)
    replica = offbeat.replicate(model, offbeat.algorithm(text))
    wrapper = nn.parallel.DistributedDataParallel(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    try:
        for _ in range(3):
            wrapper(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
        said = "trained"
    except ValueError as error:
        said = str(error)
    results.put((rank, replica.steps, said))


@pytest.mark.processes
@pytest.mark.parametrize("text", ["ddp", "local_sgd(every=1000)"])
@pytest.mark.fault(
    "the model is wrapped in DistributedDataParallel after replicate()",
    "ValueError on all ranks in the first step",
)
def test_a_wrapper_around_a_replica(text: str) -> None:
    for _, steps, said in Spawned(_wrap_after_replicate, 2, text).join(timeout=60):
        assert steps == 0
        assert "wrapped in DistributedDataParallel; pass the bare model (model.module)" in said


@pytest.mark.parametrize("text", ["adasum", "sgp", "local_sgd(every=1)"])
def test_an_optimizer_that_steps_inside_backward_started_from_equal_parameters(text: str) -> None:
    """Its hooks are older than ours, and have changed parameters before we see the first one."""

    def worker(world: World) -> list[str]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        for parameter in model.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1)
            parameter.register_post_accumulate_grad_hook(lambda _, own=optimizer: own.step())
        replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world)
        (model(torch.ones(2)) * (world.rank + 1)).sum().backward()
        replica.step()
        return replica.stats()["notes"]

    assert ThreadWorld(2).run(worker) == [[], []]
