"""``offbeat.auto``: a run that measures itself and chooses its method."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import SGD

import offbeat
from offbeat.exchange.algorithm import Auto
from offbeat.lab.check import PAYLOAD
from offbeat.recipes.auto import EXACT
from offbeat.replica.switching import autopilot
from offbeat.replica.switching.waits import Waits
from offbeat.telemetry.recording import read_run
from offbeat.testing import ThreadWorld, snapshot
from offbeat.transport.group import Group
from offbeat.transport.world import World
from outcomes import alike
from problems import Quadratic, flat, loss
from reference.participants import Array

TEXT = "auto(candidates=['ddp', 'local_sgd(every=4)'])"


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The latency and the rate that ranks measure; they decide after every 6th step."""
    figures = {"latency": 1e-8, "rate": 1e12}
    monkeypatch.setattr(autopilot, "FIRST", 6)
    monkeypatch.setattr(autopilot, "EVERY", 6)
    monkeypatch.setattr(autopilot, "SHARE", np.inf)
    monkeypatch.setattr(
        autopilot, "_measure_link", lambda group, numel: (figures["latency"], figures["rate"])
    )
    return figures


def train(replica: offbeat.Replica, optimizer: SGD, until: int) -> list[str]:
    names = []
    while replica.steps < until:
        loss(replica.model, replica.world.rank, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        replica.step()
        names.append(str(replica.algorithm))
    return names


def decided(world: World, text: str, steps: int) -> list[dict[str, Any]]:
    """Return the decisions of a run."""
    model = Quadratic()
    optimizer = SGD(model.parameters(), lr=0.05)
    replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world, optimizer=optimizer)
    train(replica, optimizer, steps)
    decisions: list[dict[str, Any]] = replica.stats()["auto"]
    replica.detach()
    return decisions


def test_chooses_in_a_phase_of_a_schedule(link: dict[str, float]) -> None:
    link["latency"] = 1.0  # seconds a message

    def work(world: World) -> list[str]:
        model = Quadratic()
        optimizer = SGD(model.parameters(), lr=0.05)
        algorithm = offbeat.algorithm(f"{TEXT} for 8 steps, then local_sgd(every=2)")
        replica = offbeat.replicate(model, algorithm, mesh=world, optimizer=optimizer)
        names = train(replica, optimizer, 10)
        replica.detach()
        return names

    for names in ThreadWorld(2).run(work):
        assert names[5:7] == 2 * ["local_sgd(every=4) until step 8, then local_sgd(every=2)"]
        assert names[7:] == 3 * ["local_sgd(every=2)"]


def test_a_choice_of_exact_means_trains_as_ddp(link: dict[str, float]) -> None:
    """Wherever the links are slow."""
    link["latency"], link["rate"] = 1.0, 1e6

    def work(world: World, text: str) -> tuple[list[str], Array]:
        model = Quadratic()
        optimizer = SGD(model.parameters(), lr=0.05)
        replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world, optimizer=optimizer)
        train(replica, optimizer, 14)
        chosen = [decision["algorithm"] for decision in replica.stats().get("auto", [])]
        replica.detach()
        return chosen, flat(snapshot(model))

    exact = ThreadWorld(3).run(lambda world: work(world, "auto(exact=True)"))
    plain = ThreadWorld(3).run(lambda world: work(world, "ddp"))
    for (chosen, ours), (_, expected) in zip(exact, plain, strict=True):
        assert len(chosen) == 2
        assert {*chosen} <= {*EXACT}
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-12)


def test_another_choice_is_among_its_own_candidates(link: dict[str, float]) -> None:
    link["latency"] = 1.0  # seconds a message

    def work(world: World) -> list[str]:
        model = Quadratic()
        optimizer = SGD(model.parameters(), lr=0.05)
        replica = offbeat.replicate(model, offbeat.algorithm(TEXT), mesh=world, optimizer=optimizer)
        train(replica, optimizer, 8)
        replica.switch("auto(candidates=['ddp', 'local_sgd(every=5)'])")
        names = train(replica, optimizer, 16)
        replica.detach()
        return names

    for names in ThreadWorld(2).run(work):
        assert names[-1] == "local_sgd(every=5)"


@pytest.mark.parametrize("waits", ["longer", "as before"])
def test_compares_waits_between_decisions(
    link: dict[str, float], waits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that wait for longer measure at the next comparison, before a decision is due."""
    monkeypatch.setattr(autopilot, "SHARE", 1e-9)
    told = {"wait": 0.0}
    monkeypatch.setattr(Waits, "said", lambda self: (told["wait"], 1.0, 0.0))

    def work(world: World) -> tuple[list[int], str]:
        model = Quadratic()
        optimizer = SGD(model.parameters(), lr=0.05)
        replica = offbeat.replicate(model, offbeat.algorithm(TEXT), mesh=world, optimizer=optimizer)
        train(replica, optimizer, 14)  # a decision after 6 steps, the first comparison after 12
        replica.gather("")
        link["latency"], told["wait"] = 1.0, 0.4 + 0.2 * (waits == "longer")
        names = train(replica, optimizer, 32)
        steps = [decision["step"] for decision in replica.stats()["auto"]]
        replica.detach()
        return steps, names[-1]

    expected = [6, 18] if waits == "longer" else [6]
    for steps, name in ThreadWorld(3).run(work):
        assert steps == expected
        assert name.startswith("local_sgd") is (waits == "longer")


def test_ranks_that_went_back_decide_with_one_that_joins() -> None:
    """Its first step is before that of an earlier one, which all know."""
    recorder: Any = SimpleNamespace(
        last={"seconds": 1.0, "seconds_stalled": 0.0}, computed=(0.2, 0.3)
    )

    def pilot(steps: int, joined: list[dict[str, int]]) -> autopilot.Autopilot:
        algorithm = offbeat.algorithm(TEXT)
        members: Any = SimpleNamespace(steps=steps, joined=joined, algorithm=algorithm)
        return autopilot.Autopilot(members, recorder)

    joined = [{"rank": 2, "step": 100}]
    old = pilot(0, joined)
    old.is_due(101)
    for step in range(11, 21):  # a state of step 10 has been loaded
        old.is_due(step)
    joined.append({"rank": 3, "step": 20})
    new, steps = pilot(20, joined), range(21, 21 + 2 * autopilot.FIRST)
    assert [old.is_due(step) for step in steps] == [new.is_due(step) for step in steps]


def test_decides_again_when_the_rate_changes(
    link: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "offbeat")

    def work(world: World) -> tuple[list[str], dict[str, Any]]:
        model = Quadratic()
        optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
        algorithm = offbeat.algorithm(TEXT)
        replica = offbeat.replicate(model, algorithm, mesh=world, optimizer=optimizer)
        names = train(replica, optimizer, 8)
        replica.gather("")
        link["latency"] = 1.0  # seconds a message
        names += train(replica, optimizer, 14)
        replica.gather("")
        link["latency"] = 1e-9
        names += train(replica, optimizer, 20)
        stats = replica.stats()
        replica.detach()
        return names, stats

    runs = ThreadWorld(3).run(work)
    names, stats = runs[0]
    assert names[5:11] == [names[5]] * 6
    assert names[11] == "local_sgd(every=4)"
    assert all(run[0] == names for run in runs)
    assert [decision["step"] for decision in stats["auto"]] == [6, 12, 18]
    assert all(run[1]["auto"] == stats["auto"] for run in runs)
    decision = stats["auto"][1]
    assert {"compute", "slowest", "stalled", "rate", "latency", "seconds"} <= decision.keys()
    assert decision["seconds"]["ddp()"] > decision["seconds"]["local_sgd(every=4)"]
    lines = [record.getMessage() for record in caplog.records if record.name == "offbeat"]
    assert len(lines) == 3
    assert "step 12: local_sgd(every=4), at" in lines[1]


@pytest.mark.usefixtures("link")
def test_the_next_one_decides_where_the_first_rank_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others then have no decision in the place of the first: here it makes none at first."""
    choose, calls = autopilot.Autopilot.choose, list[int]()

    def decide(self: autopilot.Autopilot, said: Any, steps: int) -> Any:
        calls.append(steps)
        return choose(self, said, steps) if len(calls) > 1 else None

    monkeypatch.setattr(autopilot.Autopilot, "choose", decide)

    for decisions in ThreadWorld(2).run(lambda world: decided(world, TEXT, 8)):
        assert [decision["step"] for decision in decisions] == [6]
    assert calls == [6, 6]


def test_a_recording_has_what_a_choice_took(
    link: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFBEAT_TELEMETRY", str(tmp_path))
    ThreadWorld(2).run(lambda world: decided(world, TEXT, autopilot.FIRST + 2))
    for recording in read_run(tmp_path):
        took = [step.choosing > 0 for step in recording.steps]
        assert took == autopilot.FIRST * [False] + [True, False]


def test_a_switch_that_nobody_chose_belongs_to_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the script did since the last step does not, either."""
    monkeypatch.setenv("OFFBEAT_TELEMETRY", str(tmp_path))

    def work(world: World) -> None:
        replica = offbeat.replicate(Quadratic(), offbeat.ddp(), mesh=world)
        replica.switch(offbeat.local_sgd(every=2))
        loss(replica.model, world.rank, 0).backward()
        replica.step()
        replica.detach()

    ThreadWorld(2).run(work)
    assert [[s.choosing for s in recording.steps] for recording in read_run(tmp_path)] == [[0], [0]]


def test_decides_as_often_as_costs_a_share_of_the_run(
    link: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    link["latency"] = 1.0  # a step of local_sgd(every=4) then takes about a second

    monkeypatch.setattr(autopilot, "SHARE", 1e-5)
    for (decision,) in ThreadWorld(3).run(lambda world: decided(world, TEXT, 12)):
        share = decision["cost"] / (decision["next"] - decision["step"])
        chosen = decision["seconds"]["local_sgd(every=4)"]
        assert decision["next"] > 12
        assert share <= 1e-5 * chosen < 2 * share


def test_saves_and_resumes_what_it_has_chosen(link: dict[str, float]) -> None:
    link["latency"] = 1.0

    def work(world: World) -> tuple[Array, Array, list[str]]:
        model, other = Quadratic(), Quadratic()
        optimizer, resumed = (SGD(m.parameters(), lr=0.05) for m in (model, other))
        algorithm = offbeat.algorithm(TEXT)
        replica = offbeat.replicate(model, algorithm, mesh=world, optimizer=optimizer)
        train(replica, optimizer, 9)
        saved = replica.state_dict()
        train(replica, optimizer, 13)
        end = flat(snapshot(model))
        replica.detach()
        again = offbeat.replicate(other, algorithm, mesh=world, optimizer=resumed)
        again.load_state_dict(saved)
        names = train(again, resumed, 13)
        after = flat(snapshot(other))
        train(again, resumed, 15)
        assert [decision["step"] for decision in again.stats()["auto"]] == [9 + autopilot.FIRST]
        again.detach()
        return end, after, names

    for end, after, names in ThreadWorld(3).run(work):
        assert np.array_equal(end, after)
        assert names[0].startswith(("local_sgd(every=4)", "Average(every=4"))


@pytest.mark.parametrize("calls", [1, 2])
def test_measures_a_link_without_help(calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also once more, as all do who learn at its end that a rank was lost."""
    measure = autopilot.Autopilot.measure

    def several(pilot: autopilot.Autopilot) -> dict[str, Any]:
        return [measure(pilot) for _ in range(calls)][-1]

    monkeypatch.setattr(autopilot.Autopilot, "measure", several)

    ((decision,), _) = ThreadWorld(2).run(lambda world: decided(world, "auto", autopilot.FIRST))
    assert 1e7 < decision["rate"] < 1e13
    assert 1e-6 < decision["latency"] < 1


def test_a_rate_that_a_pause_hides_is_not_infinite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Far links: the bytes take less time than the round trip varies."""
    found = {1: 0.0501, 2**18: 0.05}
    monkeypatch.setattr(autopilot, "_seconds", lambda group, numel: found[numel])
    latency, rate = autopilot._measure_link(None, 10**9)  # type: ignore[arg-type]
    assert latency == 0.0501 / 2
    assert rate * PAYLOAD == pytest.approx(8 * 4 * (2**18 - 1) / 0.005)


def test_the_rate_is_that_between_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next rank of most is on the same node."""
    nodes, between = ((0, 1, 2), (3, 4, 5)), (2, 5)
    monkeypatch.setattr(autopilot, "FIRST", 6)

    def measured(group: Group, numel: int) -> tuple[float, float]:
        return (0.01, 5e7) if group.ranks[group.rank] in between else (1e-5, 1e11)

    monkeypatch.setattr(autopilot, "_measure_link", measured)
    for (found,) in ThreadWorld(nodes=nodes).run(lambda world: decided(world, TEXT, 7)):
        assert (found["rate"], found["latency"]) == (5e7, 0.01)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_link_is_measured_by_the_bytes_that_are_sent(dtype: torch.dtype) -> None:
    sizes = set[int]()

    def work(world: World) -> None:
        replica = offbeat.replicate(Quadratic(), offbeat.ddp(), mesh=world)
        group = replica._connection.control
        assert group is not None
        before = replica.stats()["total"]["bytes_sent"]
        autopilot._seconds(group, 1000)
        sizes.add(replica.stats()["total"]["bytes_sent"] - before)
        replica.detach()

    torch.set_default_dtype(dtype)
    try:
        ThreadWorld(2).run(work)
    finally:
        torch.set_default_dtype(torch.float32)
    assert sizes == {4 * 1000 * (1 + autopilot.TRIES)}


def test_texts() -> None:
    algorithm = offbeat.algorithm("auto(exact=True)")
    assert str(algorithm) == "auto(exact=True)"
    assert offbeat.algorithm(repr(algorithm)) == algorithm
    assert isinstance(algorithm.auto, Auto)
    scheduled = offbeat.algorithm("auto(candidates=['ddp', 'ddp for 5 steps, then sgp'])")
    assert scheduled.auto == Auto(("ddp", "ddp for 5 steps, then sgp"))
    assert scheduled.then is None
    with pytest.raises(ValueError, match="leave one of both out"):
        offbeat.auto(exact=True, candidates=["ddp"])
    for candidates in ("ddp", 5, [], [5]):
        with pytest.raises(ValueError, match=r"candidates=.*, expected a list of algorithms"):
            offbeat.auto(candidates=candidates)
    with pytest.raises(ValueError, match="exact=1, expected True or False"):
        offbeat.auto(exact=1)


@pytest.mark.parametrize(
    ("candidate", "says"),
    [
        ("dpd", "unknown algorithm"),
        ("torch_ddp", "cannot choose torch_ddp"),
        ("ddp for 9 steps, then sgp", "the time of a schedule cannot be predicted"),
    ],
)
def test_candidates_that_cannot_be_run(candidate: str, says: str) -> None:
    def work(world: World) -> None:
        offbeat.replicate(Quadratic(), offbeat.auto(candidates=["ddp", candidate]), mesh=world)

    assert says in alike(work)
