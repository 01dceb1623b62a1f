"""Survivors of a lost rank train on: between threads whose heartbeat stops, and real processes."""

import os
import random
import re
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import HashStore, ProcessGroup

import offbeat
from offbeat.elastic import survivors
from offbeat.elastic.agreement import Agreement, Progress
from offbeat.elastic.survivors import agree_on_survivors
from offbeat.exchange import BoundParameters
from offbeat.liveness.failure import PeerLost
from offbeat.liveness.heartbeats import heartbeat
from offbeat.liveness.heartbeats.heartbeat import Heartbeat
from offbeat.replica import consensus
from offbeat.replica.saving.rank_files import RankFiles, Save
from offbeat.testing import ThreadWorld, snapshot
from offbeat.transport.links import Links
from offbeat.transport.world import World
from outcomes import errors_of
from problems import Quadratic, flat
from ranks import Spawned
from reference.participants import Array

CONTINUE = "sgp"


frames_of_victims = list[BaseException]()


@pytest.fixture(autouse=True)
def stopped_heartbeats(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stop the heartbeats of ranks that a test leaves connected: their threads would go on."""
    start, started = Heartbeat.__init__, []

    def remember(self: Heartbeat, *args: Any) -> None:
        start(self, *args)
        started.append(self)

    monkeypatch.setattr(Heartbeat, "__init__", remember)
    yield
    for one in started:
        one.stop()
    frames_of_victims.clear()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Impatient heartbeats: all ranks are threads of one process, so that nobody is late."""
    for name, seconds in {"BEAT": 0.2, "BROKEN_AFTER": 2.0, "SILENT_AFTER": 3.0}.items():
        monkeypatch.setattr(f"offbeat.liveness.heartbeats.heartbeat.{name}", seconds)


def perish(links: Links | None) -> None:
    """What remains of a process that dies is silence; a thread cannot be killed."""
    assert links is not None
    links.heartbeat._end_thread()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("text", ["sgp('complete')", "sgp('ring', overlap=1)"])
def test_a_loss_leaves_the_update_of_a_weighted_step_as_it_was(text: str) -> None:
    """Whoever ends the step without an exchange goes on from its own parameters."""

    def work(world: World) -> bool:
        model = Quadratic()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        kinds: Any = {"mesh": world, "elastic": True, "weighted": True}
        replica = offbeat.replicate(model, offbeat.algorithm(text), **kinds)
        replica.set_weight(32)
        was_alone = False
        for step in range(12):
            if (world.rank, step) == (1, 4):
                perish(replica._connection.links)
                return True
            model(world.rank).backward()
            optimizer.step()
            optimizer.zero_grad()
            stepped = flat(snapshot(model))
            replica.step()
            if replica._members._alone_from == step:
                assert np.array_equal(flat(snapshot(model)), stepped)
                was_alone = True
        replica.detach()
        return was_alone

    with pytest.warns(RuntimeWarning, match="lost"):
        assert any(ThreadWorld(4).run(work)[rank] for rank in (0, 2, 3))


def test_an_update_counts_by_its_samples_in_the_step_of_a_join() -> None:
    """What is in flight is merged before the exchange: all weights are 32, so nothing moves."""

    def work(world: World) -> tuple[Array, Array, float]:
        model = Quadratic()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        kinds: Any = {"mesh": world, "elastic": True, "weighted": True}
        replica = offbeat.replicate(model, offbeat.sgp(), **kinds)
        replica.set_weight(32)
        for step in range(4):
            model(world.rank).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step < 3:
                replica.step()
        stepped = flat(snapshot(model))
        weight = replica.parameters.drain()
        result = stepped, flat(snapshot(model)), weight
        replica.detach()
        return result

    for stepped, merged, weight in ThreadWorld(4).run(work):
        assert weight == 32
        np.testing.assert_allclose(merged, stepped, rtol=1e-12)


@pytest.mark.usefixtures("quick")
@pytest.mark.fault(
    "a rank computes while the others find a loss",
    "nobody else is given up",
)
def test_survivors_agree_on_the_living_and_on_the_furthest_step() -> None:
    def work(world: World) -> Agreement | None:
        links = Links.connect(world)
        if world.rank == 2:
            perish(links)
            return None
        time.sleep(3.0 if world.rank == 3 else 0.0)  # computes for longer than the dead is silent
        agreed = agree_on_survivors(
            links, Progress({0: 5, 1: 7, 3: 6}[world.rank]), PeerLost("somebody")
        )
        links.close()
        return agreed

    assert set(ThreadWorld(4).run(work)) == {None, Agreement((0, 1, 3), (2,), 7)}


@pytest.mark.usefixtures("quick")
@pytest.mark.fault("half of the world is lost at once", "the others train on")
def test_survivors_agree_without_a_long_row_of_ranks() -> None:
    def work(world: World) -> Agreement | None:
        links = Links.connect(world)
        if world.rank in range(3, 9):
            perish(links)
            return None
        agreed = agree_on_survivors(links, Progress(world.rank), PeerLost("somebody"))
        links.close()
        return agreed

    started = time.monotonic()
    agreed = Agreement((0, 1, 2, 9, 10, 11), (3, 4, 5, 6, 7, 8), 11)
    assert set(ThreadWorld(12).run(work)) == {None, agreed}
    assert time.monotonic() - started < 12, "the whole row at once"


@pytest.mark.usefixtures("quick")
def test_a_rank_is_not_waited_for_whose_node_is_lost() -> None:
    """It may wait for the lost one outside of offbeat, in a forward of FSDP2."""
    nodes, decided = ((0, 1), (2, 3), (4, 5)), threading.Event()

    def work(world: World) -> Agreement | None:
        links = Links.connect(world)
        if world.rank == 3:
            perish(links)
            return None
        if world.rank == 2:
            assert decided.wait(30)
            with pytest.raises(PeerLost, match="given up"):
                agree_on_survivors(links, Progress(2), PeerLost("somebody"), nodes)
            return None
        agreed = agree_on_survivors(links, Progress(world.rank), PeerLost("somebody"), nodes)
        decided.set()
        links.close()
        return agreed

    agreed = Agreement((0, 1, 4, 5), (2, 3), 5)
    assert ThreadWorld(6).run(work) == [agreed, agreed, None, None, agreed, agreed]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("run", "said"), [(0, "it cannot rejoin them"), (1, "start it again to rejoin them")]
)
@pytest.mark.fault(
    "a suspended rank returns after the others went on",
    "PeerLost on that rank; says that it was given up, and whether it can join again",
)
def test_one_whom_the_others_gave_up_is_told(run: int, said: str) -> None:
    decided = threading.Event()

    def work(world: World) -> None:
        links = Links.connect(world, run)
        if world.rank == 2:
            perish(links)
            assert decided.wait(30)
        agree_on_survivors(links, Progress(1), PeerLost("somebody"))
        decided.set()

    errors = errors_of(work, 3)
    assert errors[:2] == [None, None]
    assert isinstance(errors[2], PeerLost)
    assert "rank 2 was given up by the others" in str(errors[2])
    assert said in str(errors[2])


@pytest.mark.fault("a connection breaks although all ranks live", "PeerLost on all ranks")
def test_where_nobody_is_lost_the_error_stays() -> None:
    def work(world: World) -> None:
        agree_on_survivors(Links.connect(world), Progress(1), PeerLost("a connection broke"))

    assert {str(error) for error in errors_of(work, 3)} == {"a connection broke"}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("more", ["", "overlap=1, ", "overlap=2, wire='bf16', "])
@pytest.mark.fault(
    "a rank is lost under sgp()",
    "the others converge to the mean of their models",
)
def test_survivors_catch_up_and_converge_to_the_mean_of_their_models(
    more: str, draws: random.Random
) -> None:
    """No optimizer: what moves the models is gossip alone."""
    start = np.random.default_rng(1).normal(size=(4, 9))
    victim, last, steps = draws.randrange(4), 1, 24  # two exchanges would be the mean already

    def work(world: World) -> tuple[Array, Array, int, dict[str, Any]] | None:
        model = Quadratic()
        replica = offbeat.replicate(
            model, offbeat.algorithm(f"sgp({more})"), mesh=world, elastic=True
        )
        with torch.no_grad():
            for parameter, part in ((model.matrix, slice(6)), (model.vector, slice(6, None))):
                parameter.copy_(torch.tensor(start[world.rank, part]).view_as(parameter))
        at_loss, came_to = flat(snapshot(model)), 0
        for step in range(steps):
            if (world.rank, step) == (victim, last):
                perish(replica._connection.links)
                return None
            before = flat(snapshot(model))
            replica.step()
            if replica.lost and not came_to:
                at_loss, came_to = before, step + 1
        replica.finish()
        stats = replica.stats()
        result = flat(snapshot(model)), at_loss, came_to - 1, stats
        replica.detach()
        return result

    others = [rank for rank in range(4) if rank != victim]
    said = re.escape(f"ranks [{victim}] are lost; {others} train on")
    with pytest.warns(RuntimeWarning, match=said):
        results = [result for result in ThreadWorld(4).run(work) if result is not None]
    ends, at_loss, came_at, stats = zip(*results, strict=True)
    assert len(set(came_at)) > 1, "somebody had to catch up"
    for end, told in zip(ends, stats, strict=True):
        # Those that waited for the lost rank made one step more without an exchange.
        used = min(came_at) - (told["lost"][0]["used"] < min(came_at))
        assert told["lost"] == [{"rank": victim, "step": max(came_at), "used": used}]
        assert (told["size"], told["step"]) == (3, steps)
        assert np.array_equal(end, ends[0])
        # Mass is conserved from then on, casts included: only the order of float64 sums differs.
        np.testing.assert_allclose(end, np.mean(at_loss, axis=0), rtol=0, atol=1e-12)
    assert np.abs(ends[0] - start.mean(0)).max() > 1e-3, "not the mean of all four"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("verb", ["finish", "consensus", "consensus_distance"])
@pytest.mark.fault(
    "a rank is lost during finish() or consensus()",
    "the others get their own mean",
)
def test_a_loss_found_in_a_call_of_all_is_survived(verb: str) -> None:
    def work(world: World) -> tuple[float, float] | None:
        model = Quadratic()
        replica = offbeat.replicate(model, offbeat.sgp(), mesh=world, elastic=True)
        with torch.no_grad():
            model.vector.fill_(float(world.rank))
        if world.rank == 2:
            perish(replica._connection.links)
            return None
        if verb == "consensus":
            with replica.consensus():
                shown = model.vector[0].item()
        else:
            getattr(replica, verb)()
            shown = model.vector[0].item()
        replica.detach()
        return shown, model.vector[0].item()

    with pytest.warns(RuntimeWarning, match="train on"):
        results = ThreadWorld(3).run(work)
    expected = {
        "finish": [(0.5, 0.5), (0.5, 0.5), None],
        "consensus": [(0.5, 0.0), (0.5, 1.0), None],
        "consensus_distance": [(0.0, 0.0), (1.0, 1.0), None],
    }
    assert results == expected[verb]


class Died(Exception):
    """Ends the thread of a rank that is silent from now on."""


@pytest.mark.usefixtures("quick")
@pytest.mark.filterwarnings("ignore:rank .* finish.. found replicas:RuntimeWarning")
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("verb", "text"),
    [
        *(("finish", text) for text in ("ddp", "sgp(overlap=1)", "local_sgd(every=9)")),
        *(("switch", text) for text in ("local_sgd(every=9)", "diloco(every=9)")),
    ],
)
@pytest.mark.fault(
    "all ranks but one are lost during finish() or a switch",
    "the last one ends it with its own model",
)
def test_the_last_one_left_in_an_average_goes_on(
    text: str, verb: str, weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = consensus.average_parameters

    def average(slot: BoundParameters, **how: Any) -> None:
        if slot.site is not None and slot.site.world.rank == 1:
            raise Died
        real(slot, **how)

    monkeypatch.setattr(consensus, "average_parameters", average)

    def work(world: World) -> list[float] | None:
        model = Quadratic()
        replica = offbeat.replicate(
            model, offbeat.algorithm(text), mesh=world, elastic=True, weighted=weighted
        )
        if verb == "switch":
            replica.step()  # since which models differ
        placed(replica, float(world.rank + 1))
        try:
            if verb == "finish":
                replica.finish()
            else:
                replica.switch("noloco(every=7)")
        except Died:
            perish(replica._connection.links)
            return None
        assert replica.world.ranks == (0,)
        replica.step()
        replica.detach()
        return flat(snapshot(model)).tolist()

    with pytest.warns(RuntimeWarning, match="train on"):
        assert ThreadWorld(2).run(work) == [[1.0] * 9, None]


def filled(value: float) -> Quadratic:
    model = Quadratic()
    with torch.no_grad():
        model.matrix.fill_(value)
        model.vector.fill_(value)
    return model


def placed(replica: offbeat.Replica, value: float) -> None:
    """Give a rank a model of its own, after all ranks have got that of the first."""
    replica.model.load_state_dict(filled(value).state_dict())


@pytest.mark.fault(
    "a rank is lost while another one saves",
    "the others train on",
)
@pytest.mark.usefixtures("quick")
def test_a_loss_found_in_state_dict_is_survived() -> None:
    """The message of the lost rank is missing; only its receiver waits for it while it saves."""
    text, victim = "sgp(overlap=1)", 3

    def work(world: World) -> tuple[dict[str, Any], bool, float, float, dict[str, Any]] | None:
        replica = offbeat.replicate(Quadratic(), offbeat.algorithm(text), mesh=world, elastic=True)
        placed(replica, float(world.rank))
        replica.step()  # all ranks compare in their first one
        replica.consensus_distance()
        if world.rank == victim:
            perish(replica._connection.links)
            return None
        replica.step()
        at_loss = replica.model.vector[0].item()
        (entry,) = replica.state_dict().values()
        noticed = bool(replica.lost)
        for _ in range(3):
            at_loss = at_loss if replica.lost else replica.model.vector[0].item()
            replica.step()
        replica.state_dict()
        replica.consensus_distance()
        replica.finish()
        result = entry, noticed, at_loss, replica.model.vector[0].item(), replica.stats()
        replica.detach()
        return result

    with pytest.warns(RuntimeWarning, match=r"ranks \[3\] are lost; \[0, 1, 2\] train on"):
        results = [result for result in ThreadWorld(4).run(work) if result is not None]
    mean = sum(at_loss for _, _, at_loss, _, _ in results) / 3
    assert any(noticed for _, noticed, _, _, _ in results)
    for entry, here, _, end, told in results:
        assert entry["size"] == (3 if here else 4)
        if here:
            assert (entry["parameters"]["weight"], entry["parameters"]["pending_weight"]) == (1, 0)
        assert end == pytest.approx(mean, abs=1e-12)
        assert (told["size"], told["step"], len(told["lost"])) == (3, 5, 1)


@pytest.mark.fault(
    "a rank is lost while all write their files by `save_per_rank`",
    "the others save again",
)
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("writes", [False, True])
def test_survivors_of_a_loss_in_a_save_save_again(
    writes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a rank writes, and as it looks for a number, when all have taken their states."""
    write, saves, victim = RankFiles.write, RankFiles.saves, 2
    mine = threading.local()

    def dying(files: RankFiles, save: Save, rank: int, content: Any) -> None:
        if writes and (save.number, rank) == (2, victim):
            perish(links[rank])
            raise SystemExit
        write(files, save, rank, content)

    def looking(files: RankFiles) -> dict[Save, list[int]]:
        if not writes and mine.rank == victim and (tmp_path / first).exists():
            perish(links[victim])
            raise SystemExit
        return saves(files)

    first = f"offbeat-save1-rank{victim}-of-3.pt"
    monkeypatch.setattr(RankFiles, "write", dying)
    monkeypatch.setattr(RankFiles, "saves", looking)
    links: dict[int, Any] = {}

    def work(world: World) -> int | None:
        replica = offbeat.replicate(Quadratic(), offbeat.sgp(), mesh=world, elastic=True)
        links[world.rank], mine.rank = replica._connection.links, world.rank
        for _ in range(2):
            replica.step()
            try:
                offbeat.save_per_rank(tmp_path, replica=replica)
            except SystemExit:
                return None
        replica.step()
        offbeat.load_per_rank(tmp_path, replica=replica)
        return replica.steps

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert ThreadWorld(3).run(work) == [2, 2, None]
    left = sorted(path.name for path in tmp_path.iterdir())
    number = 3 if writes else 2
    assert left == [f"offbeat-save{number}-rank{rank}-of-2.pt" for rank in (0, 1)]
    for rank, name in enumerate(left):
        assert torch.load(tmp_path / name)["replica"][f"rank{rank}"]["nodes"] == [[0], [1]]


@pytest.mark.fault(
    "a rank is lost while the ranks load a checkpoint",
    "the others train on",
)
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize("lost_in", ["load_state_dict", "step"])
def test_a_loss_found_in_load_state_dict_is_survived(lost_in: str, finished: bool) -> None:
    """In the load itself, and where survivors go back to what was saved before the loss."""
    text, victim = "sgp(overlap=1)", 2

    def work(world: World) -> tuple[float, int, float] | None:
        replica = offbeat.replicate(Quadratic(), offbeat.algorithm(text), mesh=world, elastic=True)
        placed(replica, float(world.rank))
        for _ in range(2):
            replica.step()
        if finished:
            replica.finish()
        saved, own = replica.state_dict(), replica.model.vector[0].item()
        replica.step()
        placed(replica, 100.0)
        replica.consensus_distance()  # nobody dies before all have come here
        if world.rank == victim:
            perish(replica._connection.links)
            return None
        if lost_in == "step":
            replica.step()
            replica.step()
        replica.load_state_dict(saved)
        assert (replica.steps, replica.is_averaged, len(replica.lost)) == (2, finished, 1)
        assert replica.model.vector[0].item() == own
        for _ in range(2):
            replica.step()
        steps = replica.steps
        replica.finish()
        end = replica.model.vector[0].item()
        replica.detach()
        return own, steps, end

    with pytest.warns(RuntimeWarning, match="train on"):
        results = [result for result in ThreadWorld(3).run(work) if result is not None]
    mean = sum(own for own, _, _ in results) / 2
    for _, steps, end in results:
        assert steps == 4
        assert end == pytest.approx(mean, abs=1e-12)


@pytest.mark.usefixtures("quick")
def test_survivors_refuse_the_unfinished_state_of_a_larger_world() -> None:
    """That it knows this rank's name does not make it this rank's: half of the mass would go."""
    saved = {}

    def save(world: World) -> None:
        replica = offbeat.replicate(Quadratic(), offbeat.sgp(), mesh=world, elastic=True)
        replica.step()
        saved[world.rank] = replica.state_dict()
        replica.detach()

    def load(world: World) -> None:
        replica = offbeat.replicate(Quadratic(), offbeat.sgp(), mesh=world, elastic=True)
        if world.rank == 2:
            return perish(replica._connection.links)
        replica.load_state_dict(saved[world.rank])
        return None

    ThreadWorld(4).run(save)
    with pytest.warns(RuntimeWarning, match="train on"):
        first, second, _ = errors_of(load, 3)
    assert type(first) is type(second) is ValueError
    assert str(first) == str(second)
    assert "found the state of one of 4 ranks that had not finished" in str(first)


@pytest.mark.fault("two ranks are lost at once", "the others train on")
@pytest.mark.usefixtures("quick")
def test_two_ranks_lost_at_once() -> None:
    def work(world: World) -> tuple[float, dict[str, Any]] | None:
        replica = offbeat.replicate(Quadratic(), offbeat.sgp(), mesh=world, elastic=True)
        placed(replica, float(world.rank))
        if world.rank in (1, 3):
            perish(replica._connection.links)
            return None
        for _ in range(3):
            replica.step()
        replica.finish()
        result = replica.model.vector[0].item(), replica.stats()
        replica.detach()
        return result

    with pytest.warns(RuntimeWarning, match=r"ranks \[1, 3\] are lost; \[0, 2, 4\] train on"):
        results = [result for result in ThreadWorld(5).run(work) if result is not None]
    for end, told in results:
        assert end == pytest.approx(2.0, abs=1e-12)
        assert [loss["rank"] for loss in told["lost"]] == [1, 3]
        assert (told["size"], told["step"]) == (3, 3)


@pytest.mark.fault(
    "a rank is lost while the survivors of a loss connect",
    "the others train on",
)
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("connects", [False, True], ids=["before", "after its first heartbeat"])
def test_another_loss_while_survivors_connect_is_survived(
    connects: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    regroup = survivors.regroup

    def dies_here(links: Links, agreed: Agreement) -> Links | None:
        if links.world.rank != 1:
            return regroup(links, agreed)
        perish(regroup(links, agreed) if connects else links)
        raise KeyboardInterrupt

    monkeypatch.setattr(survivors, "regroup", dies_here)

    def work(world: World) -> tuple[float, dict[str, Any]] | None:
        replica = offbeat.replicate(Quadratic(), offbeat.sgp(), mesh=world, elastic=True)
        placed(replica, float(world.rank))
        if world.rank == 3:
            perish(replica._connection.links)
            return None
        try:
            for _ in range(3):
                replica.step()
        except KeyboardInterrupt:
            return None
        replica.finish()
        result = replica.model.vector[0].item(), replica.stats()
        replica.detach()
        return result

    with pytest.warns(RuntimeWarning) as said:
        results = [result for result in ThreadWorld(4).run(work) if result is not None]
    assert len(results) == 2
    for end, told in results:
        assert end == pytest.approx(1.0, abs=1e-12)
        assert [loss["rank"] for loss in told["lost"]] == [3, 1]
        assert (told["size"], told["step"]) == (2, 3)
    texts = {str(warning.message) for warning in said}
    assert any("ranks [1] are lost; [0, 2] train on" in text for text in texts)


@pytest.mark.usefixtures("quick")
@pytest.mark.fault("all ranks but one are lost", "the last one trains alone")
def test_the_last_survivor_trains_alone() -> None:
    def work(world: World) -> dict[str, Any] | None:
        replica = offbeat.replicate(Quadratic(), offbeat.sgp(), mesh=world, elastic=True)
        if world.rank == 0:
            perish(replica._connection.links)
            return None
        for _ in range(3):
            replica.step()
        replica.finish()
        replica.detach()
        return replica.stats()

    with pytest.warns(RuntimeWarning, match="train on"):
        _, stats = ThreadWorld(2).run(work)
    assert stats is not None
    assert (stats["rank"], stats["size"], stats["step"]) == (1, 1, 3)
    assert stats["lost"] == [{"rank": 0, "step": 0, "used": 0}]
    assert "slot is disabled: its group has one member" in stats["notes"][0]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("elastic", "said"), [(False, "is lost"), (True, "has left (detach)")])
@pytest.mark.fault(
    "a rank leaves (detach) while the others train",
    "PeerLost on every other rank",
)
def test_an_error_by_default_and_where_a_rank_has_left(elastic: bool, said: str) -> None:
    def work(world: World) -> None:
        replica = offbeat.replicate(Quadratic(), offbeat.sgp(), mesh=world, elastic=elastic)
        if world.rank == 1:
            return replica.detach() if elastic else perish(replica._connection.links)
        for _ in range(3):
            replica.step()
        return None

    errors = errors_of(work, 3)
    assert errors[1] is None
    for error in (errors[0], errors[2]):
        assert isinstance(error, PeerLost)
        assert f"rank 1 {said}" in str(error)


@pytest.mark.fault(
    "the graph is undefined for one rank fewer", "ValueError on all ranks in replicate()"
)
def test_a_graph_that_cannot_shrink_is_refused_by_all_when_it_is_attached() -> None:
    def work(world: World) -> None:
        algorithm = offbeat.algorithm("sgp('bipartite')")
        offbeat.replicate(Quadratic(), algorithm, mesh=world, elastic=True)

    errors = errors_of(work, 4)
    assert all(isinstance(error, ValueError) for error in errors)
    assert "without one participant too" in str(errors[0])
    assert "at size 3: pairs need an even number" in str(errors[0])
    assert errors_of(work, 2) == [None, None], "one that is left alone needs no graph"


def test_another_loss_while_survivors_connect_ends_in_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("offbeat.transport.links.RECONNECT", 0.1)

    def waits_for_the_dead(*_: object, **how: object) -> ProcessGroup:
        time.sleep(1)
        raise AssertionError("nobody waits for this")

    world = World(0, ((0,), (1,), (2,)), HashStore(), waits_for_the_dead)
    links = Links.connect(world).among([0, 1])
    with pytest.raises(PeerLost, match=r"could not connect within .* s: another rank was lost"):
        links.open("world")


def _train_to_the_end(rank: int, results: Any, text: str, victim: int, at: int) -> None:
    torch.manual_seed(rank)
    model = torch.nn.Linear(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002)
    replica = offbeat.replicate(model, offbeat.algorithm(text), elastic=True)
    losses = []
    for step in range(500):
        x = torch.randn(32, 5)
        loss = (model(x).squeeze(1) - x.sum(1)).square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (rank, step) == (victim, at):
            os.kill(os.getpid(), signal.SIGKILL)
        replica.step()
    own = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()
    replica.finish()
    end = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()
    results.put((rank, {"losses": losses, "own": own, "end": end, "stats": replica.stats()}))
    replica.detach()


def results_of_survivors(work: Any, text: str, victim: int, at: int) -> dict[int, Any]:
    """Train by four processes of which one kills itself; return what the others find."""
    world = Spawned(work, 4, text, victim, at)
    found = dict(world.join(timeout=100))
    assert world.processes[victim].exitcode == -signal.SIGKILL
    assert set(found) == set(range(4)) - {victim}
    return found


@pytest.mark.processes
@pytest.mark.fault(
    "a rank is lost under sgp()",
    "the others converge to the mean of their models",
)
def test_survivors_of_a_killed_process_train_to_the_end(draws: random.Random) -> None:
    victim, at = draws.randrange(4), draws.randrange(100, 160)
    algorithm = "sgp(overlap=1)"
    said = results_of_survivors(_train_to_the_end, algorithm, victim, at)
    first = next(iter(said.values()))
    (lost,) = first["stats"]["lost"]
    assert lost["rank"] == victim
    assert at <= lost["step"] <= at + 3
    for result in said.values():
        assert result["stats"]["lost"] == [lost]
        assert result["end"] == first["end"]
        before, after = result["losses"][: lost["step"]], result["losses"][lost["step"] :]
        assert np.mean(after[-50:]) < 0.5 * np.mean(before[-50:]), "it goes on falling"
    # The weights of the three are one up to what is in flight, and equal models hide them.
    mean = np.mean([result["own"] for result in said.values()], axis=0)
    np.testing.assert_allclose(first["end"], mean, rtol=0, atol=1e-3)


def _lose_two(rank: int, results: Any) -> None:
    """Lose rank 1, and rank 2 as it begins to connect to the two that are left."""
    if rank == 2:
        survivors.regroup = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    model = torch.nn.Linear(5, 1)
    replica = offbeat.replicate(model, offbeat.ddp(), elastic=True)
    longest, ended = 0.0, time.monotonic()
    for step in range(60):
        model(torch.randn(8, 5)).square().mean().backward()
        if (rank, step) == (1, 40):
            os.kill(os.getpid(), signal.SIGKILL)
        replica.step()
        time.sleep(0.05)  # all have met the beacons of the others by then
        longest, ended = max(longest, time.monotonic() - ended), time.monotonic()
    results.put((longest, [loss["rank"] for loss in replica.lost]))
    replica.detach()


@pytest.mark.fault(
    "a survivor ends as it begins to connect to the others",
    "the others train on after about a second, as after any loss",
)
@pytest.mark.processes
def test_a_survivor_that_ends_before_its_new_heartbeat_is_noticed() -> None:
    """Not by its silence, for which they would wait 15 s: its process answers no more."""
    said = Spawned(_lose_two, 4).join(timeout=60)
    assert [lost for _, lost in said] == [[1, 2]] * 2
    assert max(longest for longest, _ in said) < heartbeat.SILENT_AFTER / 2


def _save_after_each_step(rank: int, results: Any) -> None:
    for name, seconds in {"BEAT": 0.2, "BROKEN_AFTER": 1.5, "SILENT_AFTER": 3.0}.items():
        setattr(heartbeat, name, seconds)
    warnings.simplefilter("ignore")
    model = torch.nn.Linear(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    algorithm = offbeat.algorithm("sgp(overlap=1)")
    replica = offbeat.replicate(model, algorithm, elastic=True)
    for step in range(60):
        model(torch.randn(8, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if (rank, step) == (0, 20):
            os.kill(os.getpid(), signal.SIGKILL)
        replica.step()
        replica.state_dict()
    replica.finish()
    replica.consensus_distance()
    results.put((rank, replica.steps, [loss["rank"] for loss in replica.lost]))
    replica.detach()


@pytest.mark.fault(
    "a rank is killed while the others save",
    "the others train on",
)
@pytest.mark.processes
def test_survivors_of_a_killed_process_save_to_the_end() -> None:
    world = Spawned(_save_after_each_step, 4)
    assert sorted(world.join(timeout=60)) == [(rank, 60, [0]) for rank in (1, 2, 3)]
