"""Which processes start a run, which may join it, and what the status says of it."""

import json
from dataclasses import asdict
from typing import Any

import pytest
from torch.distributed import HashStore

from offbeat.store.runs import RETURN, Runs
from offbeat.store.status import History, Status
from offbeat.transport.run.rendezvous import ANSWERS, PLACE, SIGNS, About, Place, Sign


class Cluster:
    """Processes that are no more than their signs, and a clock."""

    def __init__(self, workers: int | None = None, settle: float = 10.0) -> None:
        self.store, self.now = HashStore(), 0.0
        self.about, self.settle = About("test", workers), settle
        self.signs: dict[str, Sign] = {}
        self.restart_store(is_new=True)

    def restart_store(self, is_new: bool = False) -> None:
        self.store = HashStore()
        keys = list[str]()

        class Listing:  # a store in memory lists no keys
            def list_keys(self) -> list[str]:
                return [*keys]

            def set(self, key: str, value: str) -> None:
                keys.extend({key} - {*keys})
                store.set(key, value)

            def delete_key(self, key: str) -> None:
                keys.remove(key)
                store.delete_key(key)

            def __getattr__(self, name: str) -> Any:
                return getattr(store, name)

        store = self.store
        self.listing: Any = Listing()
        self.runs = Runs(self.listing, self.about, self.settle)
        self.history = History(self.runs)
        if is_new:
            self.pass_by(RETURN + 1)

    def come(self, name: str, node: str = "", local_rank: int = 0, joins: bool = True) -> None:
        self.signs[name] = Sign(0, node or name, local_rank, joins)

    def pass_by(self, seconds: float, step: int = 0) -> Status:
        """Let time pass, in which those that train make ``step`` steps a second."""
        for _ in range(round(2 * seconds)):
            self.now += 0.5
            for name, sign in self.signs.items():
                moved = sign._replace(number=sign.number + 1, steps=sign.steps + step)
                self.signs[name] = moved
                self.listing.set(f"{PLACE}/{SIGNS}{name}", json.dumps(moved))
            self.runs.look(self.now)
            status = self.history.look()
            for name, sign in self.signs.items():
                if sign.place is None and (place := self.answer(name)) is not None:
                    self.signs[name] = sign._replace(place=place, rank=place.rank, state="starts")
        return status

    def answer(self, name: str) -> Place | None:
        key = f"{PLACE}/{ANSWERS}{name}"
        return Place.parse(self.store.get(key).decode()) if self.store.check([key]) else None

    def train(self, *names: str) -> None:
        for name in names:
            rank = self.signs[name].rank
            number = int(name[1:]) if rank is None else rank
            self.signs[name] = self.signs[name]._replace(state="trains", rank=number)

    def end(self, name: str, state: str) -> None:
        self.signs[name] = self.signs[name]._replace(state=state)
        self.pass_by(0.5)
        del self.signs[name]

    def places(self) -> dict[str, tuple[int, int | None]]:
        return {n: (s.place.run, s.place.rank) for n, s in self.signs.items() if s.place}


def started(*names: str) -> Cluster:
    cluster = Cluster(workers=len(names))
    for name in names:
        cluster.come(name)
        cluster.pass_by(1)
    cluster.train(*names)
    cluster.pass_by(2)
    return cluster


def test_the_first_start_in_the_order_in_which_they_come() -> None:
    cluster = Cluster(workers=3)
    for name in ("p0", "p1"):
        cluster.come(name)
        status = cluster.pass_by(1)
    assert (status.state, status.waiting, cluster.places()) == ("waiting", 2, {})
    cluster.come("p2")
    assert cluster.pass_by(1).state == "starting"
    assert cluster.places() == {"p0": (1, 0), "p1": (1, 1), "p2": (1, 2)}


def test_all_that_come_in_time_start() -> None:
    cluster = Cluster(settle=5.0)
    for number in range(4):
        cluster.come(f"p{number}")
        cluster.pass_by(1)
    assert cluster.places() == {}
    cluster.pass_by(2)
    assert list(cluster.places().values()) == [(1, 0), (1, 1), (1, 2), (1, 3)]


def test_ranks_of_a_launcher_are_a_node() -> None:
    cluster = Cluster(workers=5)
    for name, node, local_rank in (
        *(("p0", "a", 1), ("p1", "b", 0), ("p2", "a", 0), ("p3", "b", 1), ("p4", "b", 2)),
    ):
        cluster.come(name, node, local_rank)
    cluster.pass_by(1)
    place = cluster.signs["p0"].place
    assert place is not None
    assert place.nodes == ((0, 1), (2, 3, 4))
    assert [cluster.signs[f"p{i}"].rank for i in range(5)] == [1, 2, 0, 3, 4]


def test_later_ones_join_and_those_that_do_not_join_wait() -> None:
    cluster = started("p0", "p1")
    cluster.come("p2")
    cluster.come("p3", joins=False)
    status = cluster.pass_by(2)
    assert (status.waiting, cluster.places()["p2"]) == (1, (1, None))
    cluster.train("p2")
    assert [change.rank for change in cluster.pass_by(1).joined] == [2]
    for name in ("p0", "p1", "p2"):
        cluster.end(name, "ended")
    cluster.come("p4")
    status = cluster.pass_by(1)
    assert cluster.places() == {"p3": (2, 0), "p4": (2, 1)}
    assert (status.run, status.lost, status.joined) == (2, [], [])


def test_after_the_loss_of_all_a_run_starts_with_those_that_come_back() -> None:
    cluster = started("p0", "p1")
    cluster.signs.clear()  # killed at once
    cluster.come("p2")
    cluster.come("p3")
    cluster.pass_by(5)
    assert cluster.places() == {}  # nobody trains: not a run to join
    cluster.pass_by(15)
    assert cluster.places() == {"p2": (2, 0), "p3": (2, 1)}


@pytest.mark.parametrize("state", ["failed", "killed"])
def test_the_place_of_one_that_ends_before_the_start_is_given_out_again(state: str) -> None:
    cluster = Cluster(workers=2)
    cluster.come("p0")
    cluster.come("p1")
    cluster.pass_by(1)
    if state == "failed":
        cluster.end("p1", "failed")
    else:
        del cluster.signs["p1"]
    cluster.train("p0")
    cluster.come("p2")  # may join, but the run waits for a rank 1
    cluster.pass_by(20)
    assert cluster.places() == {"p0": (1, 0), "p2": (1, 1)}


def test_one_that_ends_while_it_waits_is_not_counted() -> None:
    cluster = Cluster(workers=2)
    cluster.come("p0")
    cluster.pass_by(1)
    del cluster.signs["p0"]
    cluster.pass_by(3)
    cluster.come("p1")
    cluster.pass_by(2)
    assert cluster.places() == {}
    cluster.come("p2")
    cluster.pass_by(1)
    assert cluster.places() == {"p1": (1, 0), "p2": (1, 1)}


def test_a_store_that_is_started_again_knows_the_run() -> None:
    cluster = started("p0", "p1")
    cluster.restart_store()
    cluster.come("p2")
    cluster.come("p3")
    cluster.pass_by(0.5)
    assert cluster.pass_by(RETURN + 1).run == 1
    assert cluster.places() == {"p0": (1, 0), "p1": (1, 1), "p2": (1, None), "p3": (1, None)}


def test_a_line_says_who_waits_and_who_is_silent() -> None:
    cluster = Cluster(workers=2)
    cluster.come("p0")
    assert cluster.pass_by(1).line == "run 0: waiting, 1 of 2 processes"
    cluster = started("p0", "p1", "p2")
    del cluster.signs["p1"]  # killed
    assert "3 members (1 silent), 0 lost" in cluster.pass_by(6, step=1).line


@pytest.mark.fault(
    "a process of another version, or garbage, in offbeat store", "a warning; runs go on"
)
@pytest.mark.parametrize("text", ["not json", "[1, 2]", "{}", "5", '[1, 2, "a", true]'])
def test_what_is_no_sign_is_left_out(text: str) -> None:
    cluster = started("p0", "p1")
    cluster.listing.set(f"{PLACE}/{SIGNS}other", text)
    with pytest.warns(RuntimeWarning, match="other' is no sign of a process of this version"):
        status = cluster.pass_by(2, step=1)
    assert [member.rank for member in status.members] == [0, 1]


def test_losses_and_seconds_lost() -> None:
    cluster = started("p0", "p1", "p2")
    assert cluster.pass_by(5, step=1).seconds_lost == 0
    cluster.end("p1", "failed")
    status = cluster.pass_by(8)  # nobody makes a step
    assert [(change.rank, change.step) for change in status.lost] == [(1, 10)]
    status = cluster.pass_by(5, step=1)
    assert 6 < status.seconds_lost < 9
    assert [member.rank for member in status.members] == [0, 2]
    assert (status.state, status.step) == ("training", 20)
    assert json.loads(json.dumps(asdict(status)))["lost"] == [{"rank": 1, "step": 10}]
    del cluster.signs["p2"]  # killed: known once its signs are missing for long
    status = cluster.pass_by(20, step=1)
    assert [change.rank for change in status.lost] == [1, 2]
    assert "2 lost, 0 joined" in status.line


def test_a_store_that_was_suspended_takes_nobody_for_lost() -> None:
    cluster = started("p0", "p1")
    cluster.now += 1000
    assert cluster.pass_by(2).lost == []
