"""``replica.switch``: another method from the next step on."""

import threading
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import networkx
import numpy as np
import pytest
from torch.optim import SGD, Adam

import offbeat
from offbeat.attach.slots import SlotFiller
from offbeat.platform.round_trip import FAR
from offbeat.replica.switching import agreement
from offbeat.testing import ThreadWorld, snapshot
from offbeat.topology import Topology
from offbeat.transport.handle import Handle
from offbeat.transport.messages import WIDE
from offbeat.transport.world import World
from outcomes import errors_of
from problems import RANKS, START, Quadratic, flat, gradient, loss
from recipe_cases import CASES
from reference.lags import lags
from reference.participants import Array
from reference.push_sum import ring, sgp
from reference.switched import Part, switched

NODES = ((0, 1), (2, 3))
AT, STEPS, LR = 6, 14, 0.1


def _of(text: str, equal: int = 0, **more: Any) -> Part:
    method = next(case.reference for case in CASES if case.text == text)
    assert method is not None
    return Part(method, equal, **more)


def _ring(**more: bool) -> Callable[..., Array]:
    return lambda *args, **given: sgp(*args, matrix=ring, overlap=2, **more, **given)[0]


def _lags(density: float) -> Part:
    given = partial(lags, layers=(6, 3), density=density)
    return Part(lambda *a, **k: given(*a, **k)[0], 2, residual=lambda *a, **k: given(*a, **k)[1])


LOCAL = "local_sgd(every=3)"
LAGS = "lags(density=0.2, units='gradient')"
SGP, BIASED = "sgp('ring', overlap=2)", "sgp('ring', overlap=2, biased=True)"
PARTS = {
    "ddp": _of("ddp", 2),
    LAGS: _lags(0.2),
    LOCAL: _of(LOCAL, averages=True),
    SGP: Part(_ring(), drained=_ring(drained=True)),
    "diloco(every=3)": _of("diloco(every=3)"),
    "daso(every=3, wait=2, merge='exact')": _of("daso(every=3, wait=2, merge='exact')", 1),
}


def sgd(model: Quadratic, momentum: float) -> SGD:
    return SGD(model.parameters(), lr=LR, momentum=momentum)


def train(
    world: World, first: str, second: str, momentum: float, at: int = AT, **given: Any
) -> tuple[Array, dict[str, Any]]:
    """Train on one rank; return the trajectory and the statistics."""
    model = Quadratic()
    optimizer = sgd(model, momentum)
    replica = offbeat.replicate(
        model, offbeat.algorithm(first), mesh=world, **{"optimizer": optimizer} | given
    )
    trajectory = [flat(snapshot(model))]
    for step in range(STEPS):
        if step == at:
            replica.switch(second)
        one_step(replica, optimizer, step)
        trajectory.append(flat(snapshot(model)))
    stats = replica.stats()
    replica.detach()
    return np.array(trajectory), stats


def one_step(replica: offbeat.Replica, optimizer: SGD, step: int) -> None:
    assert isinstance(replica.model, Quadratic)
    error = loss(replica.model, replica.world.rank % RANKS, step)
    replica.report_loss(error)
    error.backward()
    optimizer.step()
    optimizer.zero_grad()
    replica.step()


# From each method to two others, and to each from two.
PAIRS = [
    (first, [*PARTS][(number + by) % len(PARTS)])
    for by in (1, 3)
    for number, first in enumerate(PARTS)
]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        *PAIRS,
        (SGP, LOCAL),
        (BIASED, LOCAL),
        (BIASED, "ddp"),
        (SGP, LAGS),
        (LOCAL, "diloco(every=3)"),
        (LAGS, LAGS.replace("0.2", "0.5")),
    ],
)
def test_follows_the_reference_of_both_parts(first: str, second: str) -> None:
    biased = Part(_ring(biased=True), drained=_ring(biased=True, drained=True))
    one, other = PARTS.get(first, biased), PARTS.get(second) or _lags(0.5)
    # A velocity is no gradient: the reference of top-k cannot begin with one.
    momentum = 0.0 if second.startswith("lags") else 0.9
    runs = ThreadWorld(nodes=NODES).run(lambda world: train(world, first, second, momentum))
    ours = np.array([run for run, _ in runs]).swapaxes(0, 1)
    theirs = switched(
        one, other, START, gradient, nodes=NODES, at=AT, steps=STEPS, lr=LR, momentum=momentum
    )
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)
    if other.equal == 2:
        assert (ours[AT + 1 :] == ours[AT + 1 :, :1]).all(), "ranks hold one model, bit for bit"
    last = runs[0][1]["switches"][-1]["algorithm"]
    assert runs[0][1]["algorithm"] == last == str(offbeat.algorithm(second))


FAULTS: dict[str, tuple[Callable[[int], Any], str]] = {
    "different": (lambda rank: "ddp" if rank else "local_sgd(every=2)", "the algorithm: "),
    "one unreadable": (lambda rank: "ddp" if rank else "ddp(", "rank 0: cannot read"),
    "wrong argument": (lambda rank: "local_sgd(every=0)", "every=0, expected"),
    "no algorithm": (lambda rank: 3, "got 3, expected an algorithm"),
    "hogwild": (lambda rank: "hogwild", "unknown algorithm 'hogwild'"),
    "torch_ddp": (lambda rank: "torch_ddp", "wraps the model for good"),
    "partition": (lambda rank: "adasum(partition=True)", "for good; use partition=False"),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.fault(
    "ranks switch to different algorithms, or to one that cannot be run",
    "ValueError on all ranks; training can go on as before",
)
def test_what_one_rank_cannot_no_rank_does(name: str) -> None:
    given, message = FAULTS[name]

    def work(world: World) -> str:
        model = Quadratic()
        optimizer = sgd(model, 0.9)
        replica = offbeat.replicate(model, offbeat.ddp(), mesh=world, optimizer=optimizer)
        one_step(replica, optimizer, 0)
        with pytest.raises(ValueError, match=r".") as caught:
            replica.switch(given(world.rank))
        one_step(replica, optimizer, 1)
        assert replica.stats()["algorithm"] == "ddp()"
        replica.detach()
        return str(caught.value)

    (text,) = {*ThreadWorld(2).run(work)}
    assert message in text


def test_a_gradient_that_waits_for_its_step() -> None:
    def work(world: World) -> None:
        model = Quadratic()
        replica = offbeat.replicate(model, offbeat.ddp(), mesh=world)
        loss(model, world.rank, 0).backward()
        with pytest.raises(ValueError, match=r"after a backward that no step\(\) followed"):
            replica.switch("sgp")
        replica.detach()

    ThreadWorld(2).run(work)


@pytest.mark.parametrize(("first", "second"), [("ddp", LOCAL), (LOCAL, "ddp")])
def test_a_saved_state_is_of_the_algorithm_at_that_time(first: str, second: str) -> None:
    """A switched run that is saved goes on, under the algorithm that the state names."""

    def work(world: World) -> tuple[Array, Array]:
        model, other = Quadratic(), Quadratic()
        optimizer, resumed = (Adam(m.parameters(), lr=0.05) for m in (model, other))
        replica = offbeat.replicate(
            model, offbeat.algorithm(first), mesh=world, optimizer=optimizer
        )
        for step in range(11):
            if step == 6:
                replica.switch(second)
            if step == 8:
                saved = replica.state_dict(), deepcopy(optimizer.state_dict()), snapshot(model)
            one_step(replica, optimizer, step)  # type: ignore[arg-type]
        end = flat(snapshot(model))
        replica.detach()
        other.load_state_dict(saved[2], strict=False)
        again = offbeat.replicate(other, offbeat.algorithm(second), mesh=world, optimizer=resumed)
        resumed.load_state_dict(saved[1])
        again.load_state_dict(saved[0])
        for step in range(8, 11):
            one_step(again, resumed, step)  # type: ignore[arg-type]
        again.detach()
        return end, flat(snapshot(other))

    for end, after in ThreadWorld(3).run(work):
        assert np.array_equal(end, after)


def test_everything_else_is_as_if_the_second_had_been_there_from_the_start() -> None:
    """Bytes per step, memory, groups in use, statistics and recordings."""
    text = "sgp(overlap=1)"
    cycle = "ddp", "lags(density=0.2)", text

    def work(world: World) -> tuple[Any, ...]:
        model = Quadratic()
        optimizer = sgd(model, 0.9)
        replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world, optimizer=optimizer)
        found, opened = [], []
        for switches in ((), cycle, cycle):
            for another in switches:
                replica.switch(another)
                one_step(replica, optimizer, 0)
                one_step(replica, optimizer, 0)
            one_step(replica, optimizer, 0)
            one_step(replica, optimizer, 0)
            links = replica._connection.links
            assert links is not None
            last = replica.stats()["last"]
            held = replica.parameters.nbytes(), replica.gradients.nbytes()
            sites = [slot.site for slot in (replica.parameters, replica.gradients)]
            used = sum(len(site.groups) for site in sites if site is not None)
            found.append((last["bytes_sent"], last["messages"], *held, used))
            opened.append(len(links.opened))
        names = [switch["algorithm"] for switch in replica.stats()["switches"]]
        replica.detach()
        return *found, opened, names

    before, after, later, opened, names = ThreadWorld(4).run(work)[0]
    assert before == after == later
    assert opened[1] == opened[2], "groups that are not used wait for the next exchange"
    methods = [name.partition("(")[0] for name in names]
    assert methods == 2 * ["local_sgd", "ddp", "lags", "TopK", "sgp"]


@pytest.mark.parametrize(
    ("first", "second", "trips"),
    [
        ("ddp", LOCAL, 1),  # ranks agree
        ("sgp", LOCAL, 1 + 1),  # and compare the weights of models that stay as they are
        ("sgp", "local_sgd(every=3, nonfinite='skip')", 1 + 2 + 3),  # which would keep what is not
        (LOCAL, "d_psgd", 1 + 2 + 3),  # and average their models, and two buffers, one of integers
        ("daso(every=3)", "ddp", 1 + 2 + 3 + 2),  # and the state of their optimizers
        (LOCAL, "ddp", 1),  # and the next step averages their models
    ],
)
def test_a_switch_takes_few_round_trips(
    first: str, second: str, trips: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "round_trip", lambda: FAR)
    waits, wait = Counter[int](), Handle.wait

    def counted(self: Handle) -> None:
        waits[threading.get_ident()] += 1
        wait(self)

    def work(world: World) -> int:
        optimizer = sgd(model := Quadratic(), 0.9)
        replica = offbeat.replicate(
            model, offbeat.algorithm(first), mesh=world, optimizer=optimizer
        )
        one_step(replica, optimizer, 0)
        before = waits[threading.get_ident()]
        replica.switch(second)
        made = waits[threading.get_ident()] - before
        replica.detach()
        return made

    monkeypatch.setattr(Handle, "wait", counted)
    assert ThreadWorld(3).run(work) == [trips] * 3


def test_windows_grow_before_a_gossip_between_far_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """On each way into it, also where the run ends at once; nothing else changes."""

    def work(world: World) -> tuple[list[int], list[Array]]:
        optimizer = sgd(model := Quadratic(), 0.9)
        replica = offbeat.replicate(model, offbeat.ddp(), mesh=world, optimizer=optimizer)
        sent, trajectory = [], []
        for step, text in enumerate(["sgp", "ddp", "d_psgd", "sgp"]):
            one_step(replica, optimizer, step)
            trajectory.append(flat(snapshot(model)))
            meter = replica._connection.meter
            before = meter.totals()["bytes_sent"]
            replica.switch(text)
            sent.append(int(meter.totals()["bytes_sent"] - before) // WIDE)
        replica.detach()
        return sent, trajectory

    near = ThreadWorld(4).run(work)
    monkeypatch.setattr(agreement, "round_trip", lambda: FAR)
    far = ThreadWorld(4).run(work)
    assert [sent for sent, _ in near] == [[0, 0, 0, 0]] * 4
    assert [sent for sent, _ in far] == [[3, 0, 2, 3]] * 4  # in sgp one, two and three away
    for (_, here), (_, there) in zip(near, far, strict=True):
        # A far average before d_psgd sums in another order.
        np.testing.assert_allclose(here, there, rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    ("nodes", "graph"),
    [
        (((0, 1), (2,)), offbeat.topology.Digraph(networkx.path_graph(2))),  # a rank without a peer
        (((0, 1),), offbeat.topology.Digraph(networkx.path_graph(3))),  # a slot that is disabled
    ],
)
def test_far_ranks_without_a_gossip_need_no_graph(
    nodes: tuple[tuple[int, ...]], graph: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "round_trip", lambda: FAR)

    def work(world: World) -> int:
        optimizer = sgd(model := Quadratic(), 0.9)
        replica = offbeat.replicate(model, offbeat.ddp(), mesh=world, optimizer=optimizer)
        replica.switch(offbeat.sgp(graph, within="local"))
        one_step(replica, optimizer, 0)
        replica.detach()
        return replica.steps

    assert set(ThreadWorld(nodes=nodes).run(work)) == {1}


def test_models_that_are_equal_are_not_averaged() -> None:
    """At the start, and after ``finish()``."""

    def work(world: World) -> list[str]:
        optimizer = sgd(model := Quadratic(), 0.9)
        replica = offbeat.replicate(model, offbeat.sgp(), mesh=world, optimizer=optimizer)
        for another in ("ddp", SGP, "ddp"):
            replica.switch(another)
            one_step(replica, optimizer, 0)
            replica.finish()
        names = [switch["algorithm"] for switch in replica.stats()["switches"]]
        replica.detach()
        return names

    assert ThreadWorld(2).run(work)[0] == ["ddp()", str(offbeat.algorithm(SGP)), "ddp()"]


@pytest.mark.fault(
    "a rank has no memory for the next algorithm of switch()",
    "PeerLost on every rank",
    group="Calls that differ between ranks",
)
def test_a_rank_that_cannot_switch_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = SlotFiller.parameters

    def filled(self: SlotFiller, links: Any, control: Any) -> Any:
        if self.algorithm.parameters is not None and links.world.rank == 1:
            raise MemoryError("no more of it")
        return fill(self, links, control)

    def work(world: World) -> None:
        optimizer = sgd(model := Quadratic(), 0.9)
        replica = offbeat.replicate(model, offbeat.ddp(), mesh=world, optimizer=optimizer)
        one_step(replica, optimizer, 0)
        replica.switch(LOCAL)
        for step in range(6):
            one_step(replica, optimizer, step)

    monkeypatch.setattr(SlotFiller, "parameters", filled)
    for error in errors_of(work, 3):
        assert isinstance(error, offbeat.PeerLost)
        assert "rank 1 could not switch to local_sgd(every=3)" in str(error)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_accumulated_gradients(momentum: float) -> None:
    """Two micro-batches a step equal one of their sum, before and after a switch."""

    def work(world: World, parts: int) -> Array:
        model = Quadratic()
        optimizer = SGD(model.parameters(), lr=LR / parts, momentum=momentum)
        replica = offbeat.replicate(model, offbeat.ddp(), mesh=world, optimizer=optimizer)
        for step in range(9):
            if step in (3, 6):
                replica.switch("local_sgd(every=3)" if step == 3 else "ddp")
            for part in range(parts):
                replica.set_requires_sync(part == parts - 1)
                loss(model, world.rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
        replica.detach()
        return flat(snapshot(model))

    one, two = (ThreadWorld(3).run(lambda w, n=n: work(w, n)) for n in (1, 2))
    np.testing.assert_allclose(one, two, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("size", "first", "second", "is_reused"),
    [
        (4, "ddp", "sgp(overlap=1)", True),
        (18, "ddp", LOCAL, True),
        (18, "ddp(wire='bf16')", "sgp(overlap=1)", True),
        (18, "ddp", "sgp(overlap=1)", False),  # which needs connections that a sum does not
    ],
)
def test_the_next_exchange_reuses_connections_that_it_can_use(
    size: int, first: str, second: str, is_reused: bool
) -> None:
    def work(world: World) -> bool:
        optimizer = sgd(model := Quadratic(), 0.9)
        replica = offbeat.replicate(
            model, offbeat.algorithm(first), mesh=world, optimizer=optimizer
        )
        one_step(replica, optimizer, 0)
        links = replica._connection.links
        assert links is not None
        before, number = [*links.opened], next(links.numbers)
        replica.switch(second)
        one_step(replica, optimizer, 1)
        assert next(links.numbers) == number + 2, "names of groups go on alike on all ranks"
        kept = [group for group in links.opened if group in before]
        is_kept = len(kept) == len(before) == len(links.opened)
        replica.detach()
        return is_kept

    assert ThreadWorld(size).run(work) == [is_reused] * size


@pytest.mark.parametrize(
    ("text", "is_loaded"),
    [("ddp", False), ("auto", True), (f"ddp for 2 steps, then {LOCAL}", True)],
)
def test_kernels_are_loaded_before_a_run_that_switches(
    text: str, is_loaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in its first exchange after a switch, for which others wait."""
    loaded = list[Any]()
    monkeypatch.setattr("offbeat.replica.replicate.load_kernels", loaded.append)

    def work(world: World) -> None:
        offbeat.replicate(Quadratic(), offbeat.algorithm(text), mesh=world).detach()

    ThreadWorld(2).run(work)
    assert len(loaded) == 2 * is_loaded
