"""Asynchronous pair averaging: exact where the order is known, conserved where it is not."""

import io
import random
import threading
import time
from concurrent.futures import wait
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import SGD

import offbeat
from offbeat.functional import add_half_difference, apply_delta, take_snapshot
from offbeat.liveness.heartbeats import heartbeat
from offbeat.testing import ThreadWorld, snapshot
from offbeat.transport.group import Group
from offbeat.transport.meter import Meter
from offbeat.transport.world import World
from problems import DIMENSION, OPTIMA, START, Quadratic, flat, gradient, loss, optimum
from reference.pair_average import Event, replay
from reference.participants import Array, Nodes

LR = 0.1
UNEQUAL: Nodes = ((0, 1, 2), (3, 4), (5, 6))  # two slices; rank 2 only receives


def attach(world: World, dtype: torch.dtype = torch.float64) -> tuple[Quadratic, Any]:
    model = Quadratic(dtype)
    return model, offbeat.replicate(model, offbeat.ad_psgd(), mesh=world)


def train(model: Quadratic, replica: offbeat.Replica, step: int, lr: float = LR) -> Array:
    """One step; returns what the optimizer added to the parameters."""
    before = flat(snapshot(model))
    loss(model, replica.world.rank, step).backward()
    SGD(model.parameters(), lr=lr).step()
    model.zero_grad()
    update = flat(snapshot(model)) - before
    replica.step()
    return update


def visited(replica: Any) -> None:
    """Wait until this rank's visit is over, if it is one that visits."""
    swaps = replica.parameters.pairs
    if swaps is not None and swaps.is_initiator:
        wait([swaps.job], timeout=30)


def mass(replica: Any) -> Array:
    """Parameters with what is pending, exchanges at rest."""
    with torch.no_grad():
        _, views, weight = replica.parameters.mass()
    assert weight == 1.0
    return flat(views)


@pytest.mark.parametrize("octaves", [15, 200])
def test_both_sides_of_a_pair_cancel_bit_for_bit(octaves: int) -> None:
    """And meet in the middle: 8 bits each, at most 15 octaves apart, fit into the 24 of float32."""
    signs = torch.tensor([1.0, -1.0])[torch.randint(2, (2, 1000))]
    exponents = torch.randint(-octaves // 2, octaves // 2, (2, 1000))
    x, y = (signs * (1 + torch.rand(2, 1000))).bfloat16().ldexp(exponents)
    left, right = torch.zeros(2, 1000)
    add_half_difference(left, x, y)
    add_half_difference(right, y, x)
    assert torch.equal(left, -right)
    if octaves == 15:
        middle = ((x.double() + y.double()) / 2).float()
        assert torch.equal(x.float() + left, middle)
        assert torch.equal(y.float() + right, middle)


def test_rounding_loses_nothing() -> None:
    z, delta = torch.full((100,), 256.0).bfloat16(), torch.zeros(100)
    for _ in range(10):  # each far below the spacing of 2
        delta += 0.25
        apply_delta(z, delta)
    assert torch.equal(z.float() + delta, torch.full((100,), 258.5))
    assert z[0] == 258
    take_snapshot(z, delta, out := torch.empty(100, dtype=torch.bfloat16))
    assert torch.equal(out, z)
    apply_delta(x := torch.full((100,), 256.0), d := torch.full((100,), 0.25))
    assert torch.equal(x, torch.full((100,), 256.25))
    assert not d.any()


def test_follows_the_replay_when_one_moves_at_a_time() -> None:
    """Rank 1 answers, the others visit it in turns."""
    size = 3
    steps, turns = 6, threading.Barrier(size, timeout=30)
    order = [1, *(rank for rank in range(size) if rank != 1)]
    events: list[Event] = []
    for k in range(steps):
        for rank in order:
            events.append(("step", rank, k))
            events += [("meet", rank, 1)] if rank != 1 else []

    swaps: dict[int, Any] = {}

    def worker(world: World) -> tuple[Array, Array]:
        model, replica = attach(world)
        swaps[world.rank] = replica.parameters.pairs
        with torch.no_grad():
            model.matrix += world.rank
        for k in range(steps):
            for rank in order:
                turns.wait()
                if rank == world.rank:
                    before = swaps[1].delta[0].clone()
                    train(model, replica, k)
                    visited(replica)
                    while rank != 1 and torch.equal(swaps[1].delta[0], before):
                        time.sleep(0.001)  # the other side may take a moment longer
        turns.wait()
        z = flat(snapshot(model))
        pending = mass(replica) - z
        replica.detach()
        return z, pending

    start = np.tile(START, (size, 1))
    start[:, :6] += np.arange(size)[:, None]
    z, pending = replay(start, gradient, events, LR)
    runs = ThreadWorld(size).run(worker)
    np.testing.assert_allclose([run[0] for run in runs], z, rtol=0, atol=1e-12)
    np.testing.assert_allclose([run[1] for run in runs], pending, rtol=0, atol=1e-12)
    assert np.abs(pending).max() > 0.01


@pytest.mark.parametrize(
    ("size", "dtype"), [(3, torch.float64), (4, torch.float64), (5, torch.bfloat16)], ids=str
)
def test_the_mean_moves_by_the_updates_alone(
    size: int, dtype: torch.dtype, draws: random.Random
) -> None:
    """Whatever the delays, looked at three times on the way."""
    seeds = [draws.random() for _ in range(size)]

    def worker(world: World) -> tuple[list[Array], int]:
        model, replica = attach(world, dtype)
        pauses, seen = random.Random(seeds[world.rank]), []
        with torch.no_grad():
            model.matrix += world.rank**2
        own = flat(snapshot(model))  # where updates alone would have led
        for k in range(45):
            time.sleep(pauses.choice([0, 0, 0.001, 0.003]))
            own += train(model, replica, k)
            if k % 15 == 14:
                seen.append(mass(replica) - own)
        exchanges = replica.parameters.pairs.newest
        replica.detach()
        return seen, exchanges

    runs = ThreadWorld(size).run(worker)
    moved = np.array([seen for seen, _ in runs])
    assert all(newest > 0 for _, newest in runs)
    assert np.abs(moved).max() > 0.1, "exchanges have moved everyone"
    # The sum of what pairs have brought. Float64: roundings of numbers below 20. Pending changes
    # of 16-bit parameters are float32: 45 steps with one rounding each of numbers below 20.
    rounding = 1e-12 if dtype == torch.float64 else 45 * 20 * torch.finfo(torch.float32).eps
    np.testing.assert_allclose(moved.sum(0), 0, rtol=0, atol=size * rounding)


def test_converges_although_every_rank_has_its_own_optimum() -> None:
    size, pace = 4, threading.Barrier(4, timeout=30)

    def worker(world: World) -> Array:
        model, replica = attach(world)
        for k in range(400):
            train(model, replica, k, lr=1.0 / (k + 2))
            visited(replica)
            pace.wait()  # steps take as long as exchanges: else those that answer run ahead
        replica.finish()
        replica.detach()
        return flat(snapshot(model))

    alone = OPTIMA[:size].mean(0)
    assert np.abs(alone - optimum(size)).max() > 0.1, "without exchanges it would end elsewhere"
    for found in ThreadWorld(size).run(worker):
        # 400 steps of 1/k leave about 1/400 of the start's distance; ranks drift a little apart.
        np.testing.assert_allclose(found, optimum(size), atol=2e-2)


@pytest.mark.parametrize("slow", [0, 1], ids=["a visitor", "one that answers"])
@pytest.mark.fault(
    "a rank is slow under ad_psgd", "the others do not wait", group="Lost ranks and connections"
)
def test_nobody_waits_for_a_slow_rank(slow: int) -> None:
    """It makes three steps; the others many, and even those that visit it meet it in between."""
    size, done, gone = 4, threading.Event(), threading.Barrier(4, timeout=30)

    def worker(world: World) -> tuple[int, int]:
        model, replica = attach(world)
        while world.rank != slow and not done.is_set():
            train(model, replica, 0)
            time.sleep(0.001)
        for k in range(3 if world.rank == slow else 0):
            train(model, replica, k)
            time.sleep(0.5)
        done.set()
        swapped = replica.stats()["bytes_by_axis"]["world"]
        gone.wait()
        replica.detach()
        return replica.steps, swapped

    runs = ThreadWorld(size).run(worker)
    for rank, (steps, _) in enumerate(runs):
        # 1.5 s of steps of 1 ms and some work: hundreds, or tens on a machine under load.
        assert steps == 3 if rank == slow else steps > 30
    if slow == 1:
        assert runs[slow][1] > 10 * 3 * DIMENSION * 8, "its thread has answered all the while"


@pytest.mark.parametrize("size", [3, 4])
def test_finish_after_different_numbers_of_exchanges(size: int) -> None:
    """Twice, with training in between; the last one finds everyone equal."""

    def worker(world: World) -> list[Array]:
        model, replica = attach(world)
        ends = []
        for _ in range(2):
            for k in range(10):
                train(model, replica, k)
                time.sleep(0.001 * world.rank)
            replica.finish()
            assert replica.parameters.pairs.job is None
            assert all(not part.any() for part in replica.parameters.pairs.delta)
            ends.append(flat(snapshot(model)))
        assert replica.consensus_distance() == {"mean": 0.0, "max": 0.0}
        replica.finish()
        ends.append(flat(snapshot(model)))
        replica.detach()
        return ends

    first, *others = ThreadWorld(size).run(worker)
    assert all(np.array_equal(other, first) for other in others)
    assert not np.array_equal(first[0], first[1])
    assert np.array_equal(first[1], first[2])


def test_consensus_leaves_what_is_pending_for_the_next_step() -> None:
    size = 3

    def worker(world: World) -> tuple[Array, Array, Array]:
        model, replica = attach(world)
        with torch.no_grad():
            model.vector += world.rank
        replica.step()
        visited(replica)
        before = flat(snapshot(model))
        with replica.consensus():
            shown = flat(snapshot(model))
        assert np.array_equal(flat(snapshot(model)), before)
        pending = mass(replica) - before
        replica.step()
        after = flat(snapshot(model))
        np.testing.assert_allclose(after, before + pending, rtol=0, atol=1e-14)
        replica.finish()
        replica.detach()
        return shown, pending, flat(snapshot(model))

    for shown, pending, finished in ThreadWorld(size).run(worker):
        np.testing.assert_allclose(shown[6:], START[6:] + 1, rtol=0, atol=1e-14)
        np.testing.assert_allclose(finished, shown, rtol=0, atol=1e-14)
        assert np.abs(pending).max() > 0.1


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("offbeat")}


@pytest.mark.parametrize("stuck", [False, True], ids=["running", "visiting one that never steps"])
@pytest.mark.fault(
    "detach() is called during an exchange of ad_psgd", "its thread ends", group="Leaving"
)
def test_detach_in_the_middle_ends_the_thread(stuck: bool) -> None:
    everyone = threading.Barrier(4, timeout=30)
    before = threads()  # those of process groups of torch, which other tests have used, stay

    def worker(world: World) -> bool:
        model, replica = attach(world)
        for k in range(5 if not stuck or world.rank % 2 == 0 else 0):
            train(model, replica, k)
        everyone.wait()
        running = "offbeat-world" in {thread.name for thread in threads() - before}
        everyone.wait()
        replica.detach()
        everyone.wait()
        return running

    assert all(ThreadWorld(4).run(worker))
    until = time.monotonic() + 30
    while threads() - before and time.monotonic() < until:  # the first to leave frees sockets last
        time.sleep(0.01)
    assert not threads() - before


def test_what_was_saved_at_rest_goes_on_with_the_same_mean() -> None:
    size = 4

    def worker(world: World) -> tuple[Array, Array]:
        model, replica = attach(world)
        for k in range(6):
            train(model, replica, k)
            visited(replica)
        with replica.consensus():
            pass
        file = io.BytesIO()
        torch.save(replica.state_dict(), file)
        expected = mass(replica)
        train(model, replica, 6)
        replica.detach()

        file.seek(0)
        again, resumed = attach(world)
        train(again, resumed, 0)  # exchanges are under way when it loads
        resumed.load_state_dict(torch.load(file, weights_only=True))
        assert resumed.steps == 6
        found = mass(resumed)
        state = resumed.state_dict()[f"rank{world.rank}"]["parameters"]["random"]
        file.seek(0)
        saved = torch.load(file, weights_only=True)[f"rank{world.rank}"]["parameters"]
        assert torch.equal(state, saved["random"])
        train(again, resumed, 6)
        resumed.finish()
        resumed.detach()
        return expected, found

    for expected, found in ThreadWorld(size).run(worker):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_nodes_are_participants(dtype: torch.dtype) -> None:
    """Unequal ones: each slice meets on its own, a node's ranks stay equal, the mean stays."""
    pace = threading.Barrier(7, timeout=30)

    def worker(world: World) -> tuple[list[Array], Array]:
        model = Quadratic(dtype)
        slot = offbeat.ad_psgd(within="local").parameters
        replica = offbeat.replicate(model, offbeat.Algorithm(parameters=slot), mesh=world)
        with torch.no_grad():
            model.matrix += world.node**2
        seen = []
        for _ in range(30):
            replica.step()
            visited(replica)
            pace.wait()
            seen.append(flat(snapshot(model)))
        replica.finish()
        replica.detach()
        return seen, flat(snapshot(model))

    runs = ThreadWorld(nodes=UNEQUAL).run(worker)
    expected = START.copy()
    expected[:6] += 5 / 3
    rounding = 1e-12 if dtype == torch.float64 else 0.02  # START itself is rounded to 2^-9
    for _, end in runs:
        np.testing.assert_allclose(end, expected, rtol=0, atol=rounding)
    for node in UNEQUAL:
        assert all(np.array_equal(runs[rank][0], runs[node[0]][0]) for rank in node)
    spread = np.ptp([runs[node[0]][0][-1] for node in UNEQUAL], axis=0).max()
    assert spread < 0.4, "30 visits brought 0, 1 and 4 together"


def test_a_visit_costs_one_model_and_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """All is counted when a visit ends, also on a rank whose thread is slow to count."""
    everyone = threading.Barrier(2, timeout=30)

    def count_late(meter: Meter, *args: Any) -> None:
        time.sleep(0.1)
        Meter.sent(meter, *args)

    def worker(world: World) -> tuple[list[int], int]:
        _, replica = attach(world)
        if world.rank == 1:
            meter = replica.parameters.pairs.group.meter
            monkeypatch.setattr(meter, "sent", partial(count_late, meter))
        counts, ages = [], []
        for rank in (1, 0, 0):
            if world.rank == rank:
                replica.step()
                visited(replica)
            everyone.wait()
            counts.append(replica.stats()["total"]["bytes_sent"])
            ages.append(replica.stats()["last"].get("staleness"))
        everyone.wait()
        replica.detach()
        return [after - before for before, after in pairwise(counts)], ages[2]

    model = DIMENSION * 8
    # The visitor's second step was one after the snapshot that met another was taken.
    assert ThreadWorld(2).run(worker) == [([model + 8] * 2, 1), ([model] * 2, 1)]


@pytest.mark.fault(
    "ad_psgd is used with a backend other than Gloo",
    "ValueError on all ranks",
    group="Settings and arguments",
)
def test_without_gloo_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, "backend", lambda self, device: "nccl")

    def worker(world: World) -> None:
        monkeypatch.setattr(
            "offbeat.transport.collectives.message_device", lambda *_: torch.device("cpu")
        )
        monkeypatch.setattr(
            "offbeat.transport.small_gathers.message_device", lambda *_: torch.device("cpu")
        )
        with pytest.raises(ValueError, match="needs Gloo for CPU tensors, got 'nccl'; call"):
            attach(world)

    ThreadWorld(2).run(worker)


@pytest.mark.parametrize(
    ("leaver", "verb"),
    [(0, "step"), (1, "finish")],
    ids=["a visitor leaves", "one that answers leaves"],
)
@pytest.mark.fault(
    "a partner of ad_psgd leaves (detach)",
    "PeerLost from the next step() or finish(); names the rank",
    group="Lost ranks and connections",
)
def test_a_rank_that_leaves_is_named_on_the_main_thread(
    leaver: int, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A broken connection is explained at once, not after 5 s: it is known who has left.
    monkeypatch.setattr(heartbeat, "BROKEN_AFTER", 0.1)

    def go_on(model: Quadratic, replica: Any) -> None:
        # Nobody visits any more where the visitor has left: there it matters in finish() only.
        for k in range(10_000 if verb == "step" and leaver == 1 else 1):
            train(model, replica, k)
            time.sleep(0.002)
        replica.finish()

    def worker(world: World) -> str:
        model, replica = attach(world)
        train(model, replica, 0)
        if world.rank == leaver:
            replica.detach()
            return ""
        with pytest.raises(offbeat.PeerLost) as lost:
            go_on(model, replica)
        replica.detach()
        return str(lost.value)

    said = ThreadWorld(2).run(worker)
    assert f"rank {leaver} has left (detach) after 1 calls" in said[1 - leaver]


@pytest.mark.fault(
    "the thread of ad_psgd fails",
    "its error is raised by the next step()",
    group="Lost ranks and connections",
)
def test_an_error_of_the_thread_is_raised_by_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def worker(world: World) -> None:
        model, replica = attach(world)
        swaps = replica.parameters.pairs

        def fail(*partner: int) -> None:
            raise MemoryError("no room")

        monkeypatch.setattr(swaps, "_initiate" if swaps.is_initiator else "_respond", fail)
        train(model, replica, 0)
        wait([swaps.job], timeout=30)
        with pytest.raises(MemoryError, match="no room"):
            train(model, replica, 1)
        replica.detach()

    ThreadWorld(2).run(worker)


@pytest.mark.fault(
    "ranks make different numbers of steps before finish()",
    "ValueError on all ranks; lists the numbers",
    group="Calls that differ between ranks",
)
def test_unequal_numbers_of_steps_are_refused_alike() -> None:
    def worker(world: World) -> str:
        model, replica = attach(world)
        for k in range(3 + (world.rank == 2)):
            train(model, replica, k)
        with pytest.raises(ValueError, match="call") as refused:
            replica.finish()
        replica.detach()
        return str(refused.value)

    assert len(set(ThreadWorld(3).run(worker))) == 1
