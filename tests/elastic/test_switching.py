"""A switch in an elastic run: a loss in the middle of it, and ranks that come after it."""

import copy
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from test_survivors import perish, quick, stopped_heartbeats
from test_transactions import Lost, mean_of, waits
from torch.optim import SGD

import offbeat
from crowd import Crowd
from offbeat.elastic import commits, generation
from offbeat.liveness.failure import PeerLost
from offbeat.replica.switching import autopilot
from offbeat.testing import ThreadWorld, snapshot
from offbeat.transport.world import World
from problems import Quadratic, flat, loss
from reference.participants import Array

__all__ = ["quick", "stopped_heartbeats", "waits"]  # fixtures

AT, STEPS, VICTIM, SIZE = 3, 7, 1, 4
LOCAL = "local_sgd(every=2)"


def sgd(model: Quadratic) -> SGD:
    return SGD(model.parameters(), lr=0.1)


def expected(first: str, in_average: bool) -> Array:
    """Train in one process: all ranks until the switch, then the survivors."""
    models = [Quadratic() for _ in range(SIZE)]
    optimizers = [sgd(model) for model in models]
    others = [model for rank, model in enumerate(models) if rank != VICTIM]
    for step in range(STEPS):
        meets = step == AT and first == LOCAL  # the first step of ddp() averages the models
        is_ddp = (step < AT) == (first == "ddp") and not meets
        members = models if step < AT or (in_average and meets) else others
        for rank, model in enumerate(models):
            loss(model, rank, step).backward()
        if is_ddp:
            mean_of(members, lambda parameter: parameter.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if meets or (not is_ddp and step % 2):
            mean_of(members, lambda parameter: parameter.data)
    mean_of(others, lambda parameter: parameter.data)
    return flat(snapshot(others[0]))


def train(world: World, first: str, second: str, arm: Any) -> tuple[Array, dict[str, Any]] | None:
    model = Quadratic()
    optimizer = sgd(model)
    given = {"mesh": world, "optimizer": optimizer, "elastic": True}
    replica = offbeat.replicate(model, offbeat.algorithm(first), **given)
    try:
        for step in range(STEPS):
            if step == AT:
                arm(world.rank)
                replica.switch(second)
            loss(model, world.rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
    except Lost:
        perish(replica._connection.links)
        return None
    return ended(replica)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("first", "second", "after"),
    [("ddp", LOCAL, 3), *((LOCAL, "ddp", after) for after in range(1, 7))],
)
@pytest.mark.fault(
    "a rank is lost while the run switches method",
    "the others train on",
)
def test_a_loss_in_a_switch(first: str, second: str, after: int, waits: dict[int, int]) -> None:
    def arm(rank: int) -> None:
        if rank == VICTIM:
            waits[threading.get_ident()] = after

    with pytest.warns(RuntimeWarning, match=r"ranks \[1\] are lost"):
        run = ThreadWorld(SIZE).run(lambda world: train(world, first, second, arm))
    results = [result for result in run if result]
    assert len(results) == SIZE - 1
    for end, stats in results:
        misses = [np.abs(end - expected(first, with_it)).max() for with_it in (True, False)]
        assert min(misses) < 1e-12, misses
        assert stats["algorithm"] == str(offbeat.algorithm(second))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("room", "name", "earlier"),
    [
        (generation, "gather_bytes", 0),
        (commits, "gather_numbers", 0),
        (commits, "gather_numbers", 1),
    ],
    ids=["the question", "that all have the answer", "that all have switched"],
)
def test_a_switch_that_one_has_made_all_make(
    room: ModuleType, name: str, earlier: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gather, armed = getattr(room, name), dict[int, int]()

    def torn(said: Any, group: Any) -> Any:
        found, here = gather(said, group), threading.get_ident()
        if here in armed and (said == () or name == "gather_bytes"):
            armed[here] -= 1
            if armed[here] >= 0:
                return found
            del armed[here]
            if group.ranks[group.rank] == VICTIM:
                raise Lost
            raise PeerLost("the connection of this rank broke before it heard of the others")
        return found

    def arm(rank: int) -> None:
        if rank in (VICTIM, 2):
            armed[threading.get_ident()] = earlier

    monkeypatch.setattr(room, name, torn)
    with pytest.warns(RuntimeWarning, match=r"ranks \[1\] are lost"):
        run = ThreadWorld(SIZE).run(lambda world: train(world, "ddp", LOCAL, arm))
    for end, stats in filter(None, run):
        np.testing.assert_allclose(end, expected("ddp", True), rtol=0, atol=1e-12)
        assert stats["algorithm"] == LOCAL


def joined_by_one(work: Callable[[World], Any]) -> list[Any]:
    """What two ranks return, and one that joins them."""
    crowd = Crowd(2, work)
    crowd.come(crowd.world.newcomer(), after=0.3)
    with pytest.warns(RuntimeWarning, match="has joined"):
        results = crowd.all()
    assert not [each for each in results if isinstance(each, Exception)], results
    return results


def ended(replica: offbeat.Replica) -> tuple[Array, dict[str, Any]]:
    replica.finish()
    found = flat(snapshot(replica.model)), replica.stats()
    replica.detach()
    return found


def test_a_rank_joins_a_run_that_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """All decide in the same steps, which those before have known from their last decision."""
    monkeypatch.setattr(autopilot, "FIRST", 3)
    monkeypatch.setattr(autopilot, "SHARE", np.inf)
    monkeypatch.setattr(autopilot, "_measure_link", lambda group, numel: (1.0, 1e9))
    ends: list[int] = []

    def work(world: World) -> dict[str, Any]:
        model = Quadratic()
        optimizer, auto = sgd(model), offbeat.auto(candidates=["ddp", LOCAL])
        replica = offbeat.replicate(model, auto, mesh=world, optimizer=optimizer, elastic=True)
        while not ends or replica.steps < ends[0]:
            loss(model, replica.world.rank % SIZE, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
            if replica.joined and not ends:
                ends.append(replica.joined[-1]["step"] + 3 + 10 + 1)
        return ended(replica)[1]

    results = joined_by_one(work)
    joined = results[0]["joined"][-1]["step"]
    decided = [[each["step"] for each in stats["auto"]] for stats in results]
    assert all(steps[-2:] == [joined + 3, joined + 13] for steps in decided), decided


@pytest.mark.fault("a rank joins in the last step of a phase", "it begins the next with the others")
def test_a_rank_joins_in_a_step_that_averages_models() -> None:
    """Every step is one: whenever it joins, the others go on with ddp() after it."""
    ends: list[int] = []

    def work(world: World) -> tuple[Array, dict[str, Any]]:
        optimizer = sgd(model := Quadratic())
        given = {"mesh": world, "optimizer": optimizer, "elastic": True}
        replica = offbeat.replicate(model, offbeat.sgp(), **given)
        while not ends or replica.steps < ends[0]:
            replica.switch("sgp")
            replica.switch("ddp")
            loss(model, replica.world.rank % SIZE, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
            if replica.joined and not ends:
                ends.append(replica.joined[-1]["step"] + 5)
        return ended(replica)

    results = joined_by_one(work)
    assert {stats["algorithm"] for _, stats in results} == {"ddp()"}
    assert all(np.array_equal(end, results[0][0]) for end, _ in results)


def test_a_rank_joins_after_a_switch() -> None:
    """It runs the same script, and goes on with the algorithm of the others."""
    ends: list[int] = []

    def work(world: World) -> tuple[Array, dict[str, Any]]:
        model = Quadratic()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        algorithm = offbeat.algorithm("ddp")
        replica = offbeat.replicate(model, algorithm, mesh=world, optimizer=optimizer, elastic=True)
        while not ends or replica.steps < ends[0]:
            loss(model, replica.world.rank % SIZE, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
            if replica.steps == 4:
                replica.switch(LOCAL)
            if replica.joined and not ends:
                ends.append(replica.joined[-1]["step"] + 20)
        return ended(replica)

    results = joined_by_one(work)
    assert {stats["algorithm"] for _, stats in results} == {LOCAL, "Average(every=2)"}
    assert all(np.array_equal(end, results[0][0]) for end, _ in results)


@pytest.mark.parametrize("switches", [False, True])
def test_a_rank_that_joins_in_a_later_phase_goes_back_with_the_others(switches: bool) -> None:
    """To a state of the first phase, which all load after the join."""
    plan = "ddp for 3 steps, then local_sgd(every=2)"
    ends: list[int] = []

    def work(world: World) -> tuple[Array, dict[str, Any]]:
        optimizer = sgd(model := Quadratic())
        given = {"mesh": world, "optimizer": optimizer, "elastic": True}
        start = offbeat.algorithm("sgp" if switches else plan)
        replica = offbeat.replicate(model, start, **given)
        if switches and not replica.is_new:
            replica.switch(plan)
        while not ends or replica.steps < ends[0]:
            loss(model, replica.world.rank % SIZE, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
            if replica.steps == 2:
                early.update(replica.state_dict())
                models.append(copy.deepcopy(model.state_dict()))
            if replica.joined and not ends:
                ends.append(replica.joined[-1]["step"] + 5)
        model.load_state_dict(models[0])  # equal on all ranks in that phase
        replica.load_state_dict(early)
        return ended(replica)

    early, models = dict[str, Any](), list[dict[str, torch.Tensor]]()
    results = joined_by_one(work)
    assert {stats["step"] for _, stats in results} == {2}
    assert {stats["algorithm"][:4] for _, stats in results} == {"ddp(", "Mean"}  # as it is composed
    assert len({len(stats["switches"]) for _, stats in results}) == 1
