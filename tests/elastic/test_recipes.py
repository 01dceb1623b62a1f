"""Every recipe goes on after a loss, and lets ranks join: against references written apart."""

import itertools
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_survivors import perish, quick, stopped_heartbeats
from test_transactions import RECIPES as LOST_THERE
from test_transactions import Lost, waits
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

import offbeat
from crowd import Crowd
from offbeat.elastic import leaving
from offbeat.testing import ThreadWorld, snapshot
from offbeat.transport.world import World
from problems import START, Quadratic, flat, gradient
from reference import members
from reference.participants import Array

__all__ = ["quick", "stopped_heartbeats", "waits"]  # fixtures

STEPS, VICTIM, LR = 14, 1, 0.05
FRAGMENTS = (slice(0, 6), slice(6, 9))
RECIPES: dict[str, Callable[[], members.Method]] = {
    "ddp(bucket_mb=0.00004)": lambda: members.Ddp(START),
    "lags(density=0.34)": lambda: members.Lags(START),
    "local_sgd(every=2)": lambda: members.LocalSgd(START),
    "adasum": lambda: members.Adasum(START),
    "adasum(every=2, method='gather')": lambda: members.Adasum(START, every=2),
    "diloco(every=2)": lambda: members.Diloco(START),
    "diloco(every=4, fragments=2, delay=3)": lambda: members.Diloco(
        START, every=4, fragments=FRAGMENTS, delay=3, mixing=0.5
    ),
    "sparse_loco(every=2, density=0.5, bits=None)": lambda: members.SparseLoco(START),
    "noloco(every=2)": lambda: members.Noloco(START),
    "daso(every=4, wait=2)": lambda: members.Daso(START),
}
OTHERS = "diloco(every=4, fragments=2, delay=3)", "noloco(every=2)", "sgp", "ad_psgd"
COUPLED = [text for text in RECIPES if not text.startswith(("noloco", "daso", "diloco(every=4"))]


class Rank:
    """One rank that trains."""

    def __init__(self, world: World, text: str) -> None:
        self.model = Quadratic()
        self.optimizer = SGD(self.model.parameters(), lr=LR, momentum=0.5)
        self.schedule = StepLR(self.optimizer, step_size=10_000)
        self.replica = offbeat.replicate(
            self.model,
            offbeat.algorithm(text),
            mesh=world,
            optimizer=self.optimizer,
            elastic=True,
        )
        self.replica.register("schedule", self.schedule)

    def step(self) -> None:
        self.model(self.replica.world.rank).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.replica.step()

    def ends(self) -> tuple[int, Array, dict[str, Any]]:
        """The rank, its own parameters, and its stats."""
        own, stats = flat(snapshot(self.model)), self.replica.stats()
        assert self.schedule.last_epoch == stats["step"]
        self.replica.finish()
        self.replica.detach()
        return stats["rank"], own, stats


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("text", [text for text in RECIPES if text not in LOST_THERE])
@pytest.mark.parametrize("after", [0, 1, 3])
@pytest.mark.fault(
    "a rank is lost at any moment of a step",
    "the others train on; no batch is lost",
)
def test_a_loss_at_any_message(text: str, after: int, waits: dict[int, int]) -> None:
    size, others = 4, [0, 2, 3]

    def work(world: World) -> tuple[int, Array, dict[str, Any]] | None:
        rank = Rank(world, text)
        try:
            for step in range(STEPS):
                if (world.rank, step) == (VICTIM, 5):
                    waits[threading.get_ident()] = after
                rank.step()
        except Lost:
            perish(rank.replica._connection.links)
            return None
        return rank.ends()

    with pytest.warns(RuntimeWarning, match=r"s \[1\] are lost"):
        found = [each for each in ThreadWorld(size).run(work) if each is not None]
    assert [rank for rank, _, _ in found] == others
    misses = []
    for at in range(5, STEPS + 1):  # the victim takes part until some exchange, then never
        expected = members.train(
            RECIPES[text](), gradient, ranks=range(size), steps=STEPS, lr=LR, momentum=0.5,
            losses={at: [VICTIM]},
        )  # fmt: skip
        misses.append(max(np.abs(own - expected[rank]).max() for rank, own, _ in found))
    assert min(misses) < 1e-12, misses
    unit = "node" if text.startswith("daso") else "rank"
    for _, _, stats in found:
        assert [loss[unit] for loss in stats["lost"]] == [VICTIM]
        assert stats["lost"] == found[0][2]["lost"]
        assert (stats["size"], stats["step"]) == (3, STEPS)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("text", RECIPES)
@pytest.mark.fault(
    "a worker joins",
    "it gets model, optimizer, schedule and shared state, bit for bit",
    group="Ranks that join",
)
def test_a_rank_joins(text: str) -> None:
    last = list[int]()

    def work(world: World) -> tuple[int, Array, dict[str, Any]]:
        rank = Rank(world, text)
        while not last or rank.replica.steps < last[0]:
            time.sleep(0.01)
            rank.step()
            if rank.replica.joined and not last:
                last.append(rank.replica.joined[0]["step"] + 12)
        return rank.ends()

    crowd = Crowd(3, work)
    crowd.come(crowd.world.newcomer(), after=0.3)
    found = crowd.all()
    assert not [each for each in found if isinstance(each, Exception)], found
    at = found[0][2]["joined"][0]["step"]
    expected = members.train(
        RECIPES[text](), gradient, ranks=range(3), steps=last[0], lr=LR, momentum=0.5,
        joins={at: 3},
    )  # fmt: skip
    for rank, own, stats in found:
        np.testing.assert_allclose(own, expected[rank], rtol=0, atol=1e-12)
        assert stats["joined"] == found[0][2]["joined"]
        assert (stats["size"], stats["lost"], stats["step"]) == (4, [], last[0])
    if text in COUPLED and last[0] % 2 == 0:
        assert all(np.array_equal(own, found[0][1]) for _, own, _ in found)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("text", COUPLED)
def test_a_rank_that_began_alone_exchanges_with_one_that_joins(text: str) -> None:
    def work(world: World) -> tuple[int, Array, dict[str, Any]]:
        rank = Rank(world, text)
        while not rank.replica.joined or rank.replica.steps < rank.replica.joined[0]["step"] + 8:
            time.sleep(0.01)
            rank.step()
        if rank.replica.steps % 2:
            rank.step()
        return rank.ends()

    crowd = Crowd(1, work)
    crowd.come(crowd.world.newcomer(), after=0.3)
    one, two = (own for _, own, _ in crowd.all())
    np.testing.assert_array_equal(one, two)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("text", [text for text in RECIPES if not text.startswith("daso")])
@pytest.mark.fault(
    "a rank leaves an elastic run (leave())",
    "the others do not wait",
    group="Leaving",
)
def test_a_rank_leaves(text: str) -> None:
    last = list[int]()

    def work(world: World) -> tuple[int, Array, dict[str, Any]] | None:
        rank = Rank(world, text)
        while not last or rank.replica.steps < last[0]:
            time.sleep(0.01)
            rank.step()
            if rank.replica.steps == 5 and world.rank == VICTIM:
                rank.replica.leave()
            if rank.replica.has_left:
                with pytest.raises(ValueError, match="after detach"):
                    rank.replica.step()
                return None
            if rank.replica.lost and not last:
                last.append(rank.replica.lost[0]["step"] + 8)
        return rank.ends()

    found = [each for each in ThreadWorld(4).run(work) if each is not None]
    (lost,) = found[0][2]["lost"]
    assert (lost["rank"], lost["left"]) == (VICTIM, 1)
    assert lost["used"] == lost["step"] + 1 or "delay" in text
    expected = members.train(
        RECIPES[text](), gradient, ranks=range(4), steps=last[0], lr=LR, momentum=0.5,
        leaves={lost["step"] + 1: VICTIM},
    )  # fmt: skip
    assert [rank for rank, _, _ in found] == [0, 2, 3]
    for rank, own, stats in found:
        np.testing.assert_allclose(own, expected[rank], rtol=0, atol=1e-12)
        assert (stats["lost"], stats["size"], stats["step"]) == ([lost], 3, last[0])


@pytest.mark.usefixtures("impatient")
@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")
@pytest.mark.parametrize(
    ("event", "text"),
    [
        *itertools.product(("loss", "join", "switch"), (*COUPLED, *OTHERS)),
        *(("leave", text) for text in ("ddp", "sgp", "local_sgd(every=2)")),
    ],
)
@pytest.mark.fault(
    "a rank is lost, leaves or joins, or the method is switched, after a layer was frozen",
    "the others train on, and finish() makes them equal",
)
def test_a_layer_is_frozen_before_others_come_and_go(event: str, text: str) -> None:
    def work(world: World) -> Array | None:
        rank, replica = (made := Rank(world, text)), made.replica
        awaits = event in ("join", "leave")  # which all see in one step
        while replica.steps < 24 or (awaits and not replica.joined + replica.lost):
            time.sleep(0.01)
            rank.model.matrix.requires_grad_(replica.steps < 3)
            if (event, world.rank, replica.steps) == ("loss", VICTIM, 6):
                perish(replica._connection.links)
                return None
            if (event, world.rank, replica.steps) == ("leave", VICTIM, 6):
                replica.leave()
            if (event, replica.steps) == ("switch", 6):
                replica.switch("ddp" if text.startswith("dil") else "diloco(every=2)")
            rank.step()
            if replica.has_left:
                return None
        replica.finish()
        own = flat(snapshot(rank.model))
        replica.detach()
        return own

    crowd = Crowd(3, work)
    if event == "join":
        crowd.come(crowd.world.newcomer(), after=0.2)
    found = [each for each in crowd.all() if each is not None]
    assert len(found) == {"switch": 3, "join": 4}.get(event, 2)
    for own in found:
        np.testing.assert_array_equal(own, found[0])


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("text", ["sgp", "sgp(overlap=1)", "sgp('ring', outer='SGD(lr=1.0)')"])
def test_mass_stays_when_a_rank_leaves(text: str) -> None:
    """No optimizer: the weighted mean of all models stays, also without the one that leaves."""
    last = list[int]()

    def work(world: World) -> Array | None:
        replica = offbeat.replicate(Quadratic(), offbeat.algorithm(text), mesh=world, elastic=True)
        with torch.no_grad():
            replica.model.vector.fill_(float(world.rank))
        while not last or replica.steps < last[0]:
            time.sleep(0.01)
            replica.step()
            if replica.steps == 2 and world.rank == VICTIM:
                replica.leave()
            if replica.has_left:
                return None
            if replica.lost and not last:
                last.append(replica.lost[0]["step"] + 12)
        replica.finish()
        replica.detach()
        return flat(snapshot(replica.model))

    ends = [end for end in ThreadWorld(4).run(work) if end is not None]
    assert len(ends) == 3
    for end in ends:
        np.testing.assert_allclose(end[6:], 1.5, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("impatient")
@pytest.mark.fault(
    "a rank is lost before another one has left",
    "the other one leaves",
    group="Leaving",
)
def test_a_leave_outlasts_a_loss() -> None:
    def work(world: World) -> bool:
        rank = Rank(world, "ddp")
        rank.step()
        if world.rank == 0:
            perish(rank.replica._connection.links)
            return False
        rank.replica.leave()
        while not rank.replica.has_left:
            time.sleep(0.01)
            rank.step()
        return True

    assert ThreadWorld(3).run(work) == [False, True, True]


def test_who_cannot_leave_is_told_so() -> None:
    def work(world: World) -> None:
        replica = offbeat.replicate(Quadratic(), offbeat.ddp(), mesh=world)
        with pytest.raises(ValueError, match="pass elastic=True"):
            replica.leave()
        with pytest.raises(ValueError, match="pass elastic=True"):
            offbeat.leave_on_signal(replica)
        replica.detach()

    ThreadWorld(2).run(work)


@pytest.mark.usefixtures("quick")
def test_samples_of_a_lost_mean_count_in_the_next_one() -> None:
    """A mean in flight is dropped: then windows hold all since the last one that has committed."""

    def work(world: World) -> tuple[float, float, int, int] | None:
        model = Quadratic()
        algorithm = offbeat.diloco(every=4, delay=3)
        replica = offbeat.replicate(model, algorithm, mesh=world, elastic=True, weighted=True)
        replica.set_weight(world.rank + 1)
        optimizer = SGD(model.parameters(), lr=LR)
        try:
            while replica.steps < 7 or not replica.lost:
                if (world.rank, replica.steps) == (VICTIM, 6):
                    raise Lost
                model(world.rank).backward()
                optimizer.step()
                optimizer.zero_grad()
                replica.step()
        except Lost:
            perish(replica._connection.links)
            return None
        (window,) = {*replica.parameters.windows()}
        taken = replica.steps, replica.lost[0]["used"]
        replica.detach()
        return window.samples / (world.rank + 1), window.sent, *taken

    with pytest.warns(RuntimeWarning, match=r"s \[1\] are lost"):
        found = [each for each in ThreadWorld(3).run(work) if each is not None]
    for samples, sent, steps, used in found:
        assert (samples, sent) == (steps - used, 0)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("text", ["ddp", "local_sgd(every=3)", "sgp"])
def test_a_rank_with_a_weight_joins(text: str) -> None:
    """Its window begins empty, and push-sum weights add up to the samples of all."""
    last = list[int]()

    def work(world: World) -> tuple[Array, float, int]:
        model = Quadratic()
        optimizer = SGD(model.parameters(), lr=LR)
        replica = offbeat.replicate(
            model, offbeat.algorithm(text), mesh=world, elastic=True, weighted=True
        )
        assert [window.samples for window in replica.parameters.windows() if replica.joined] in (
            [],
            [0.0],
        )
        replica.set_weight(replica.world.rank + 1)
        while not last or replica.steps < last[0]:
            time.sleep(0.01)
            model(replica.world.rank).backward()
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
            if replica.joined and not last:
                last.append(3 * (replica.joined[0]["step"] // 3) + 12)
        own = flat(snapshot(model)), replica.parameters.measures().get("weight", 0.0)
        replica.detach()
        return *own, replica.world.size

    crowd = Crowd(3, work)
    crowd.come(crowd.world.newcomer(), after=0.3)
    found = crowd.all()
    assert not [each for each in found if isinstance(each, Exception)], found
    assert [size for _, _, size in found] == [4] * 4
    if text == "sgp":
        assert sum(weight for _, weight, _ in found) == pytest.approx(1 + 2 + 3 + 4, abs=1e-12)
    else:
        assert all(np.array_equal(own, found[0][0]) for own, _, _ in found)


@pytest.mark.usefixtures("impatient")
def test_a_leave_is_waited_for_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leaving one has its part of the sum when another one still waits for a message."""
    all_reduce = leaving.all_reduce

    def slow(share: Any, group: Any) -> Any:
        def wait() -> None:
            all_reduce(share, group).wait()
            if group.ranks[group.rank] == 2:
                with group.detector.watching():
                    time.sleep(1.0)
                    group.detector.raise_agreed_error()

        return SimpleNamespace(wait=wait)

    def work(world: World) -> float | None:
        replica = offbeat.replicate(Quadratic(), offbeat.sgp(), mesh=world, elastic=True)
        with torch.no_grad():
            replica.model.vector.fill_(float(world.rank))
        if world.rank == VICTIM:
            replica.leave()
        while not replica.lost:
            time.sleep(0.01)
            replica.step()
            if replica.has_left:
                return None
        replica.finish()
        replica.detach()
        return replica.model.vector[0].item()

    monkeypatch.setattr(leaving, "all_reduce", slow)
    assert ThreadWorld(3).run(work) == [pytest.approx(1.0), None, pytest.approx(1.0)]
