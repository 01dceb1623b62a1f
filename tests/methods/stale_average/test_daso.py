"""DASO between nodes: exact trajectories, phases, plateaus, messages in flight."""

import io
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import ReduceLROnPlateau

import offbeat
from offbeat.functional import cast_difference, merge_exact_sum, merge_stale_sum, progress
from offbeat.methods import Cycle, Mean, StaleAverage
from offbeat.testing import ThreadWorld, simulate, snapshot
from offbeat.transport.world import World
from problems import DIMENSION, OPTIMA, START, Quadratic, flat, gradient, loss
from reference.adasum import bf16
from reference.daso import daso, eq_1, exact, paces
from reference.participants import Array, Nodes

LR, MOMENTUM, STEPS = 0.1, 0.9, 30
LAYOUTS: list[Nodes] = [
    ((0, 1), (2, 3)),
    ((0, 1), (2, 3), (4, 5)),
    ((0, 1), (2,)),
    ((0, 1, 2), (3,)),
    ((0, 1, 2), (3, 4), (5, 6)),  # rank 2 only receives
]
TWO_BY_TWO = LAYOUTS[0]


def sgd(parameters: Any) -> SGD:
    return SGD(parameters, lr=LR, momentum=MOMENTUM)


def train(model: nn.Module, replica: offbeat.Replica, optimizer: Any, steps: int) -> None:
    for step in range(steps):
        loss(model, replica.world.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        replica.step()


# ---- the equations ------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "wait"), [(2, 4), (5, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_merge_is_eq_1(size: int, wait: int, dtype: torch.dtype) -> None:
    numel = 70_000  # more than a block
    models = torch.randn(size, numel).to(dtype)
    x = torch.randn(numel).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    total = models.to(wide).sum(0)
    merge_stale_sum(total, x, wait, size)
    expected = eq_1(x.double().numpy()[None], models.double().numpy(), wait)[0]
    # Sums and products of numbers up to about 5 * size, each rounded once.
    np.testing.assert_allclose(
        total.double().numpy(), expected, rtol=0, atol=20 * size * torch.finfo(wide).eps
    )


def test_merge_of_two_by_hand() -> None:
    local, x1, x2 = torch.randn(3, 10, dtype=torch.float64)
    merge_stale_sum(total := x1 + x2, local, wait=1, size=2)
    torch.testing.assert_close(total, (2 * local + x1 + x2) / 4, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(("size", "wait"), [(2, 1), (4, 3)])
def test_equal_models_stay_bit_equal(size: int, wait: int) -> None:
    x = torch.randn(1000) * 10 ** torch.randn(1000)
    merge_stale_sum(total := x * size, x, wait, size)
    assert torch.equal(total, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_exact_merge_is_the_mean_and_what_came_since(dtype: torch.dtype) -> None:
    size, numel = 3, 70_000  # more than a block
    models = torch.randn(size, numel).to(dtype)
    x = torch.randn(numel).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    total = models.to(wide).sum(0)
    merge_exact_sum(total, x, models[0].to(wide), size)
    expected = exact(x.double().numpy()[None], models.double().numpy())[0]
    np.testing.assert_allclose(
        total.double().numpy(), expected, rtol=0, atol=20 * size * torch.finfo(wide).eps
    )


@pytest.mark.parametrize(
    ("merge", "every", "wait", "nodes"),
    [
        ("weighted", 4, 1, TWO_BY_TWO),
        ("weighted", 3, 2, ((0,), (1,), (2,), (3,))),
        ("weighted", 1, 1, TWO_BY_TWO),
        ("exact", 3, 2, TWO_BY_TWO),
    ],
    ids=str,
)
def test_how_far_equal_updates_bring_the_model(
    merge: Any, every: int, wait: int, nodes: Nodes
) -> None:
    """All add 1 in every step: the share of it that is left, as `measures` says."""
    cycle, steps = Cycle(every=every, wait=wait), 40 * every
    average = StaleAverage(cycle=cycle, merge=merge)

    def worker(world: World) -> tuple[float, float]:
        model = nn.Linear(1, 1, bias=False).double()
        replica = offbeat.replicate(model, offbeat.Algorithm(parameters=average), mesh=world)
        seen = []
        for _ in range(steps):
            with torch.no_grad():
                model.weight += 1.0
            replica.step()
            replica.report_loss(1.0)
            seen.append(model.weight.item())
        share = replica.stats()["measures"]["progress"]
        replica.detach()
        return (seen[-1] - seen[-1 - 20 * every]) / (20 * every), share

    for moved, share in ThreadWorld(nodes=nodes).run(worker):
        assert share == (1 if merge == "exact" else progress(every, wait, len(nodes)))
        assert moved == pytest.approx(share, abs=1e-6)


def test_narrow_sends_differences_and_keeps_what_the_cast_took() -> None:
    x, r = torch.randn(2, 1000)
    error = torch.randn(1000) * 1e-3
    wanted = (x - r) + error
    cast_difference(x, r, error, message := torch.zeros(1000, dtype=torch.bfloat16))
    assert torch.equal(message, wanted.bfloat16())
    assert torch.equal(message.float() + error, wanted)


# ---- when ---------------------------------------------------------------------------------------


def events(cycle: Cycle, steps: int) -> str:
    """Of each step: blocking (b, B where a phase opens), a sum that starts (s), nothing (-)."""
    pace = cycle.start
    return "".join(
        ("B" if cycle.opens(k) else "b" if cycle.is_blocking(k) else "s")
        if cycle.is_blocking(k) or cycle.sends(k, pace)
        else "-"
        for k in range(steps)
    )


@pytest.mark.parametrize(
    ("cycle", "expected"),
    [
        (Cycle(every=3), "--s--s--s-"),
        (Cycle(every=3, warmup_steps=2), "Bbs--s--s-"),
        (Cycle(every=4, wait=4), "---s---s--"),
        (Cycle(every=1), "ssssssssss"),
        (Cycle(every=3, total_steps=9, warmup_steps=1, cooldown_steps=2), "B-s--s-Bbb"),
        # No cool-down: the sum of step 8 would arrive after the run.
        (Cycle(every=2, wait=2, total_steps=9, cooldown_steps=0, warmup_steps=0), "-s-s-s---B"),
        (Cycle(every=2, total_steps=4, warmup_steps=2, cooldown_steps=2), "Bbbbbbbbbb"),
        (Cycle(every=2, total_steps=4, warmup_steps=0, cooldown_steps=4), "Bbbbbbbbbb"),
        (Cycle(every=2, total_steps=20), "Bs-s-s-s-s"),  # a twentieth
    ],
    ids=repr,
)
def test_phases(cycle: Cycle, expected: str) -> None:
    assert events(cycle, 10) == expected


@pytest.mark.parametrize(("every", "wait"), [(1, 1), (3, 1), (4, 1), (8, 2), (16, 4)])
def test_the_paper_waits_for_a_quarter(every: int, wait: int) -> None:
    assert Cycle(every=every).start.wait == wait


def sequence(cycle: Cycle, losses: list[float]) -> list[tuple[int, int]]:
    pace, found = cycle.start, []
    for value in losses:
        pace = cycle.after(value, pace)
        found.append((pace.every, pace.wait))
    return found


def test_plateaus_halve_and_reset() -> None:
    cycle = Cycle(every=4, wait=2, patience=1, threshold=0.1)
    losses = [1.0, 0.95, 0.95, 0.8, 0.8, 0.8, 0.8, 0.8, 9.0, 8.95, 8.95]
    # 0.95 is no tenth below 1: bad, and bad again. Nor is 0.8 below 0.8. At (1, 1) all starts
    # anew, so that 9 is the best there is, and two windows later 8.95 is a plateau.
    expected = [(4, 2), (4, 2), (2, 1), (2, 1), (2, 1), (1, 1), (1, 1), (4, 2), (4, 2), (4, 2)]
    assert sequence(cycle, losses) == [*expected, (2, 1)]


def test_what_is_not_a_number_is_no_better() -> None:
    cycle = Cycle(every=4, wait=2, patience=0)
    assert sequence(cycle, [float("nan"), 1.0, float("inf")]) == [(2, 1), (2, 1), (1, 1)]


@pytest.mark.parametrize("patience", [0, 1, 3])
@pytest.mark.parametrize("threshold", [0.0, 1e-4, 0.05])
def test_plateaus_are_those_of_torch(patience: int, threshold: float) -> None:
    noise = random.Random(patience)
    losses = [max(0.1, 1 - k / 60) + noise.gauss(0, 0.05) for k in range(90)]
    losses[10] = float("nan")
    start = 2**100  # never down to 1 in 90 windows: there ours starts anew, and torch's does not
    optimizer = SGD([nn.Parameter(torch.zeros(()))], lr=float(start))
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=patience, threshold=threshold)
    theirs = []
    for value in losses:
        scheduler.step(value)
        theirs.append(int(optimizer.param_groups[0]["lr"]))
    cycle = Cycle(every=start, wait=1, patience=patience, threshold=threshold)
    assert [every for every, _ in sequence(cycle, losses)] == theirs
    assert len(set(theirs)) > 5, "plateaus were seen"


@pytest.mark.parametrize("patience", [0, 2])
def test_resets_follow_the_reference(patience: int) -> None:
    noise = random.Random(3)
    losses = [noise.uniform(0.5, 1.0) for _ in range(80)]
    cycle = Cycle(every=6, wait=3, patience=patience)
    found = sequence(cycle, losses)
    assert found == paces(losses, 6, 3, patience)
    assert {(6, 3), (3, 1), (1, 1)} == set(found)


# ---- trajectories -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "wait"),
    [(LAYOUTS[0], 2), (LAYOUTS[1], 1), (LAYOUTS[2], 4), (LAYOUTS[3], 1), (LAYOUTS[4], 4)],
    ids=str,
)
def test_follows_the_reference(nodes: Nodes, wait: int) -> None:
    """Warm-up, cycling with a sum that the cool-down cuts short where W = 4, cool-down."""
    phases = {"total_steps": STEPS, "warmup_steps": 3, "cooldown_steps": 9}
    algorithm = offbeat.daso(every=4, wait=wait, **phases)
    runs = simulate(algorithm, Quadratic, loss, steps=STEPS, nodes=nodes, optimizer=sgd)
    ours = np.array([[flat(s) for s in run] for run in runs]).swapaxes(0, 1)
    theirs = daso(
        START,
        gradient,
        nodes=nodes,
        steps=STEPS,
        lr=LR,
        momentum=MOMENTUM,
        every=4,
        wait=wait,
        warmup=3,
        cooldown=9,
        total=STEPS,
        rounded=bf16,
    )
    # float64 throughout. Both round the same differences to 16 bits: a tie that falls differently
    # would show as 1e-3.
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)
    for node in nodes:
        assert all(np.array_equal(ours[:, rank], ours[:, node[0]]) for rank in node)


def test_sums_travel_on_while_a_plateau_halves_b_and_w() -> None:
    """Losses differ between ranks, and one never tells any: all decide alike, by the mean."""
    nodes, steps = LAYOUTS[2], 48
    cycle = Cycle(every=8, wait=4, patience=0, report_every=4)
    losses = [1.0, 0.9, 0.9, 0.8, 0.8, 0.8, 0.7, 0.7, 0.7, 0.6, 0.6, 0.6]  # one a window

    def worker(world: World) -> list[Array]:
        model = Quadratic()
        replica = offbeat.replicate(
            model,
            offbeat.Algorithm(Mean(over="local"), StaleAverage(cycle=cycle)),
            mesh=world,
        )
        optimizer, seen = sgd(model.parameters()), [flat(snapshot(model))]
        for k in range(steps):
            value = losses[k // 4] + (k % 4 - 1.5) / 8
            if world.rank != 2:
                replica.report_loss(torch.tensor(value - 0.1 if world.rank else value + 0.1))
            train(model, replica, optimizer, 1)
            seen.append(flat(snapshot(model)))
        replica.detach()
        return seen

    ours = np.array(ThreadWorld(nodes=nodes).run(worker)).swapaxes(0, 1)
    table = [(8, 4), *paces(losses, 8, 4, patience=0)]
    assert len(set(table)) > 3
    theirs = daso(
        START,
        gradient,
        nodes=nodes,
        steps=steps,
        lr=LR,
        momentum=MOMENTUM,
        every=8,
        wait=4,
        pace=lambda k: table[(k + 1) // 4],  # from the window's last step on
    )
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)


def test_ranks_by_themselves_may_be_participants_too() -> None:
    algorithm = offbeat.Algorithm(
        parameters=StaleAverage(cycle=Cycle(every=2, wait=2), over="world")
    )
    runs = simulate(algorithm, Quadratic, loss, steps=12, size=3, optimizer=sgd)
    ours = np.array([[flat(s) for s in run] for run in runs]).swapaxes(0, 1)
    lone = ((0,), (1,), (2,))
    theirs = daso(START, gradient, nodes=lone, steps=12, lr=LR, momentum=MOMENTUM, every=2, wait=2)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)


# ---- blocking phases ----------------------------------------------------------------------------


def test_a_blocking_step_is_the_mean_within_two_roundings() -> None:
    """At most 2 * 2^-8 of the largest difference to the reference; the first one is exact."""

    def worker(world: World) -> None:
        model = nn.Linear(50, 40)
        replica = offbeat.replicate(model, offbeat.daso(warmup_steps=9), mesh=world)
        for step in range(3):
            before = flat_of(model)
            everyone = []
            for node in range(3):
                moved = torch.randn(before.shape, generator=torch.Generator().manual_seed(node))
                everyone.append(before + 1e-3 * moved)
            with torch.no_grad():
                mine = everyone[world.node].split([p.numel() for p in model.parameters()])
                for parameter, part in zip(model.parameters(), mine, strict=True):
                    parameter.copy_(part.view_as(parameter))
            replica.step()
            exact = torch.stack(everyone).double().mean(0)
            largest = max(float((x - before).abs().max()) for x in everyone)
            off = float((flat_of(model) - exact).abs().max())
            # Beside the roundings to 16 bits, those of float32 numbers below 1.
            assert off <= (2 * 2**-8 * largest if step else 0.0) + 4 * 2**-24
            assert step == 0 or off > 2**-20, "16 bits were on the wire"
        replica.detach()

    ThreadWorld(nodes=((0,), (1,), (2,))).run(worker)


def flat_of(model: nn.Module) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def test_updates_far_below_the_spacing_of_16_bits_reach_the_float32_result() -> None:
    """Parameters near 100, where bf16 numbers lie 0.5 apart; updates of 1e-3 and less."""

    class Far(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.full((4,), 100.0))

    def pull(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        target = torch.tensor([100.1, 99.9, 100.05, 100.0]) + (rank - 0.5) / 10
        return 0.5 * (model.x - target).square().sum()

    def last(algorithm: offbeat.Algorithm) -> torch.Tensor:
        nodes = ((0,), (1,))
        runs = simulate(
            algorithm, Far, pull, steps=250, nodes=nodes, optimizer=lambda p: SGD(p, lr=0.02)
        )
        return runs[0][-1]["x"]

    narrow_wire = last(offbeat.daso(warmup_steps=250))
    full = last(offbeat.daso(warmup_steps=250, wire=None))
    assert (full - 100).abs().max() > 0.05
    # A few units in the last place of float32 near 100, after 250 roundings either way.
    torch.testing.assert_close(narrow_wire, full, rtol=0, atol=1e-4)


def test_ranks_are_equal_after_every_blocking_step() -> None:
    runs = simulate(
        offbeat.daso(warmup_steps=5), Quadratic, loss, steps=5, nodes=LAYOUTS[4], optimizer=sgd
    )
    for step in range(6):
        assert all(np.array_equal(flat(run[step]), flat(runs[0][step])) for run in runs)


@pytest.mark.fault(
    "daso trains for longer than total_steps",
    "a warning; later steps average and wait",
    group="Settings and arguments",
)
def test_beyond_the_run_steps_are_blocking_and_it_is_said_once() -> None:
    def worker(world: World) -> bool:
        model = Quadratic()
        algorithm = offbeat.daso(every=2, total_steps=4, warmup_steps=0, cooldown_steps=0)
        replica = offbeat.replicate(model, algorithm, mesh=world)
        train(model, replica, sgd(model.parameters()), 7)
        distance = replica.consensus_distance()
        replica.detach()
        return distance == {"mean": 0.0, "max": 0.0}

    with pytest.warns(RuntimeWarning, match="step 5 is beyond total_steps=4") as heard:
        assert all(ThreadWorld(nodes=TWO_BY_TWO).run(worker))
    assert len(heard) == 1
    assert heard[0].filename == __file__, "the warning names the line of the user"


@pytest.mark.fault(
    "nobody calls report_loss() under daso",
    "a warning; B and W stay as they are",
    group="Settings and arguments",
)
@pytest.mark.parametrize("told", [None, 2])
def test_that_nobody_reports_a_loss_is_said_once(told: int | None) -> None:
    """One rank that reports one is enough, as the mean is over those that do."""

    def worker(world: World) -> None:
        model = Quadratic()
        algorithm = offbeat.daso(every=2, warmup_steps=2, report_every=4)
        replica = offbeat.replicate(model, algorithm, mesh=world)
        optimizer = sgd(model.parameters())
        for step in range(12):
            if world.rank == told and step == 3:
                replica.report_loss(1.0)
            train(model, replica, optimizer, 1)
        replica.detach()

    if told is not None:
        ThreadWorld(nodes=TWO_BY_TWO).run(worker)  # a warning would be an error
        return
    with pytest.warns(RuntimeWarning, match="no rank has reported a loss in 4 steps") as heard:
        ThreadWorld(nodes=TWO_BY_TWO).run(worker)
    assert len(heard) == 1
    assert heard[0].filename == __file__, "the warning names the line of the user"


# ---- who sends ----------------------------------------------------------------------------------


def sent_between_nodes(algorithm: offbeat.Algorithm, nodes: Nodes, steps: int) -> list[list[int]]:
    def worker(world: World) -> list[int]:
        model = Quadratic(torch.float32)
        replica = offbeat.replicate(model, algorithm, mesh=world)
        optimizer, counts = sgd(model.parameters()), []
        for _ in range(steps):
            before = replica.stats()["bytes_by_axis"].get("node", 0)
            train(model, replica, optimizer, 1)
            counts.append(replica.stats()["bytes_by_axis"].get("node", 0) - before)
        replica.detach()
        return counts

    return ThreadWorld(nodes=nodes).run(worker)


def test_groups_of_equal_local_rank_take_turns() -> None:
    """One sum after every second step; each time another pair, and rank 2 has no counterpart."""
    size = 4 * (DIMENSION + 1)  # 10, so that two slices are equal; 2 (P-1)/P of it for two nodes
    found = sent_between_nodes(offbeat.daso(every=2), ((0, 1, 2), (3, 4)), 8)
    first, second = [0, size, 0, 0, 0, size, 0, 0], [0, 0, 0, size, 0, 0, 0, size]
    assert found == [first, second, [0] * 8, first, second]


def test_blocking_steps_send_half_the_bytes() -> None:
    size = 4 * (DIMENSION + 1)
    (first, second, *_) = sent_between_nodes(offbeat.daso(warmup_steps=9), TWO_BY_TWO, 5)
    assert first == [size, 0, size // 2, 0, size // 2]
    assert second == [0, size // 2, 0, size // 2, 0]


def test_a_loss_is_told_to_others_only_where_a_window_ends() -> None:
    def worker(world: World) -> list[int]:
        model = Quadratic()
        algorithm = offbeat.daso(every=100, warmup_steps=1, report_every=3)
        replica = offbeat.replicate(model, algorithm, mesh=world)
        train(model, replica, sgd(model.parameters()), 1)
        counts = []
        for _ in range(6):
            before = replica.stats()["bytes_by_axis"]["world"]
            replica.report_loss(1.0)
            train(model, replica, sgd(model.parameters()), 1)
            counts.append(replica.stats()["bytes_by_axis"]["world"] - before)
        replica.detach()
        return counts

    numbers = 80 * 3  # a sum and a count, in a block of one size, to three others
    for counts in ThreadWorld(nodes=TWO_BY_TWO).run(worker):
        assert counts == [0, 0, numbers, 0, 0, numbers]


@pytest.mark.parametrize("nodes", [((0, 1),), ((0,), (1,))], ids=["one node", "one rank a node"])
def test_a_slot_without_partners_is_left_out(nodes: Nodes) -> None:
    def worker(world: World) -> list[str]:
        model = Quadratic()
        replica = offbeat.replicate(model, offbeat.daso(), mesh=world)
        replica.report_loss(1.0)
        train(model, replica, sgd(model.parameters()), 5)
        replica.finish()
        replica.detach()
        return replica.notes

    slot = "parameters" if len(nodes) == 1 else "gradients"
    for notes in ThreadWorld(nodes=nodes).run(worker):
        assert notes == [
            f"the {slot} slot is disabled: its group has one member, so daso() exchanges no {slot}"
        ]


# ---- in flight ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stop", "merge"), [(3, "exact"), (4, "weighted"), (6, "exact"), (7, "weighted")]
)
def test_resumes_bit_equal_wherever_the_sum_is(stop: int, merge: Any) -> None:
    """Also in a replica that has a sum of its own in flight, which is forgotten."""
    cycle = Cycle(
        every=4,
        wait=3,
        total_steps=40,
        warmup_steps=2,
        cooldown_steps=34,
        patience=0,
        report_every=2,
    )  # 2 warm-up, 4 cycling
    algorithm = offbeat.Algorithm(Mean(over="local"), StaleAverage(cycle=cycle, merge=merge))

    def go_on(model: nn.Module, replica: offbeat.Replica, optimizer: Any, steps: int) -> None:
        for _ in range(steps):
            replica.report_loss(1.0)
            train(model, replica, optimizer, 1)

    def worker(world: World) -> None:
        model = Quadratic(torch.float32)
        replica = offbeat.replicate(model, algorithm, mesh=world)
        optimizer = Adam(model.parameters(), lr=LR)
        go_on(model, replica, optimizer, stop)
        file = io.BytesIO()
        torch.save([replica.state_dict(), optimizer.state_dict()], file)
        go_on(model, replica, optimizer, 7)
        file.seek(0)
        saved, momenta = torch.load(file, weights_only=True)
        again = Quadratic(torch.float32)
        resumed = offbeat.replicate(again, algorithm, mesh=world)
        go_on(again, resumed, SGD(again.parameters(), lr=LR), 4)
        resumed.load_state_dict(saved)
        optimizer = Adam(again.parameters(), lr=LR)
        optimizer.load_state_dict(momenta)
        go_on(again, resumed, optimizer, 7)
        for (name, ours), theirs in zip(again.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(ours, theirs), name
        assert resumed.stats()["measures"] == replica.stats()["measures"]
        assert resumed.stats()["last"]["staleness"] == replica.stats()["last"]["staleness"]
        for left in (replica, resumed):
            left.detach()

    ThreadWorld(nodes=TWO_BY_TWO).run(worker)


@pytest.mark.fault(
    "a checkpoint of daso with a sum in flight is loaded on other nodes",
    "ValueError on all ranks; shows both layouts",
    group="Checkpoints",
)
def test_a_sum_in_flight_is_not_for_other_nodes() -> None:
    saved: dict[int, Any] = {}

    def save(world: World) -> None:
        model = Quadratic()
        replica = offbeat.replicate(model, offbeat.daso(every=2), mesh=world)
        train(model, replica, sgd(model.parameters()), 2)
        saved[world.rank] = replica.state_dict()
        replica.detach()

    def load(world: World) -> str:
        replica = offbeat.replicate(Quadratic(), offbeat.daso(every=2), mesh=world)
        with pytest.raises(ValueError, match="found the state of the nodes") as error:
            replica.load_state_dict(saved[world.rank])
        replica.detach()
        return str(error.value)

    ThreadWorld(nodes=TWO_BY_TWO).run(save)
    assert len(set(ThreadWorld(nodes=((0, 1, 2), (3,))).run(load))) == 1


@pytest.mark.parametrize("nodes", [LAYOUTS[1], LAYOUTS[3]], ids=str)
def test_consensus_and_finish_count_the_sum_in_flight(nodes: Nodes) -> None:
    """Three steps after it started: merged by eq. 1 with the models of now, then the mean."""
    wait, steps = 4, 7

    def worker(world: World, look: bool) -> tuple[Array, Array, Array]:
        model = Quadratic()
        replica = offbeat.replicate(model, offbeat.daso(every=4, wait=wait), mesh=world)
        train(model, replica, sgd(model.parameters()), steps)
        shown = np.zeros(DIMENSION)
        if look:
            with replica.consensus():
                shown = flat(snapshot(model))
        optimizer = sgd(model.parameters())
        train(model, replica, optimizer, 3)
        own = flat(snapshot(model))
        replica.finish()
        assert replica.parameters.rotation.pending is None
        replica.detach()
        return shown, own, flat(snapshot(model))

    world = ThreadWorld(nodes=nodes)
    looked = world.run(lambda world: worker(world, look=True))
    unseen = world.run(lambda world: worker(world, look=False))
    for (_, a, last), (_, b, other) in zip(looked, unseen, strict=True):
        assert np.array_equal(a, b)
        assert np.array_equal(last, other)
    assert all(np.array_equal(last, looked[0][2]) for _, _, last in looked)
    z = daso(
        START, gradient, nodes=nodes, steps=steps, lr=LR, momentum=MOMENTUM, every=4, wait=wait
    )
    heads = [node[0] for node in nodes]
    expected = eq_1(z[-1][heads], z[4][heads], wait).mean(axis=0)
    for shown, _, _ in looked:
        np.testing.assert_allclose(shown, expected, rtol=0, atol=1e-12)


def test_staleness_and_pace_are_told() -> None:
    def worker(world: World) -> list[tuple[Any, ...]]:
        model = Quadratic()
        algorithm = offbeat.daso(every=4, wait=2, warmup_steps=2)
        replica = offbeat.replicate(model, algorithm, mesh=world)
        seen = []
        for _ in range(10):
            train(model, replica, sgd(model.parameters()), 1)
            stats = replica.stats()
            seen.append((stats["last"]["staleness"], *stats["measures"].values()))
        replica.detach()
        return seen

    left = progress(4, 2, len(TWO_BY_TWO))
    blocking = [(0, 1, 0, 1.0)] * 2
    cycling = [(age, 4, 2, left) for age in (1, 2, 3, 2, 3, 4, 5, 2)]
    for seen in ThreadWorld(nodes=TWO_BY_TWO).run(worker):
        assert seen == blocking + cycling


# ---- any model ----------------------------------------------------------------------------------


class Odd(nn.Module):
    """Of no dimension, without elements, with gaps, tied, frozen, in two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(1.0))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.gaps = nn.Parameter(torch.zeros(6, 4)[:, 1])
        self.frozen = nn.Parameter(torch.full((3,), 7.0), requires_grad=False)
        self.low = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
        self.nothing = nn.Parameter(torch.zeros(0, dtype=torch.float64))
        self.one = nn.Linear(3, 3, bias=False)
        self.other = nn.Linear(3, 3, bias=False)
        self.other.weight = self.one.weight


@pytest.mark.parametrize(
    ("phases", "nodes"),
    [("daso(every=2, wait=1)", LAYOUTS[3]), ("daso(warmup_steps=9)", TWO_BY_TWO)],
    ids=str,
)
def test_models_of_any_kind(phases: str, nodes: Nodes) -> None:
    def worker(world: World) -> dict[str, torch.Tensor]:
        model = Odd()
        start = model.one.weight.detach().clone()
        algorithm = offbeat.Algorithm(parameters=offbeat.algorithm(phases).parameters)
        replica = offbeat.replicate(model, algorithm, mesh=world)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter += 2.0 * world.node
        for _ in range(4):
            replica.step()
        replica.state_dict()
        replica.finish()
        replica.detach()
        assert model.other.weight is model.one.weight
        moved = (model.one.weight - model.one.weight[0, 0]).detach()
        first = world.rank == 0
        assert not first or torch.allclose(moved, start - start[0, 0], atol=1e-6)
        return {name: p.detach().double() for name, p in model.named_parameters()}

    for found in ThreadWorld(nodes=nodes).run(worker):
        assert found["frozen"].tolist() == [7.0] * 3
        assert found["empty"].shape == (0, 4)
        # Between 0 and 2 apart, the mean is 1 more.
        torch.testing.assert_close(found["scalar"].item(), 2.0, rtol=0, atol=1e-2)
        torch.testing.assert_close(found["gaps"], torch.ones(6).double(), rtol=0, atol=1e-2)
        torch.testing.assert_close(found["low"], torch.full((5,), 2.0).double(), rtol=0, atol=0.02)


@pytest.mark.fault(
    "a gradient overflows on one rank under GradScaler",
    "all ranks skip the step and lower the scale",
)
def test_grad_scaler_and_clipping_with_an_overflow_on_one_rank() -> None:
    """Its node skips that step, as one, and the sums of both travel on."""

    def worker(world: World) -> tuple[list[float], list[torch.Tensor]]:
        model = Quadratic()
        replica = offbeat.replicate(model, offbeat.daso(every=2, wait=1), mesh=world)
        optimizer = sgd(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
        scales, models = [], []
        for step in range(8):
            factor = torch.inf if (world.rank, step) == (1, 3) else 1.0
            scaler.scale(loss(model, world.rank, step) * factor).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            replica.step()
            scales.append(scaler.get_scale())
            models.append(flat_of(model))
        replica.finish()
        models.append(flat_of(model))
        replica.detach()
        return scales, models

    found = ThreadWorld(nodes=TWO_BY_TWO).run(worker)
    assert [scales[-1] for scales, _ in found] == [512.0, 512.0, 1024.0, 1024.0]
    for first, second in (found[:2], found[2:]):
        assert all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))
    assert torch.equal(found[0][1][2], found[0][1][3])  # nothing was due with the skipped step
    assert not torch.equal(found[2][1][2], found[2][1][3])
    assert torch.equal(found[0][1][-1], found[2][1][-1])
    assert found[0][1][-1].isfinite().all()


def test_a_parameter_of_more_than_ten_million_elements() -> None:
    class Huge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small = nn.Parameter(torch.zeros(3))
            self.huge = nn.Parameter(torch.zeros(10_000_019))

    def worker(world: World) -> tuple[torch.Tensor, float]:
        model = Huge()
        replica = offbeat.replicate(
            model, offbeat.Algorithm(parameters=StaleAverage(cycle=Cycle(every=2))), mesh=world
        )
        with torch.no_grad():
            model.small += 4.0 * world.node
            model.huge += 4.0 * world.node
        for _ in range(3):
            replica.step()
        replica.detach()
        return model.huge[[0, 5_000_000, -1]].detach(), model.small[0].item()

    low, high = ThreadWorld(nodes=((0,), (1,))).run(worker)
    assert low[0].tolist() == [1.0] * 3  # (2 * 0 + 0 + 4) / 4
    assert high[0].tolist() == [3.0] * 3
    assert (low[1], high[1]) == (1.0, 3.0)


# ---- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"every": 0}, "every=0, expected a whole number of steps, 1 or more"),
        ({"every": 2.0}, "every=2.0, expected a whole number"),
        ({"every": 4, "wait": 5}, "wait=5 with every=4: .*; use wait <= every"),
        ({"wait": 0}, "wait=0, expected None or a whole number of steps, 1 or more"),
        ({"wait": -1}, "wait=-1, expected None or a whole number of steps, 1 or more"),
        (
            {"warmup_steps": -1},
            "warmup_steps=-1, expected None or a whole number of steps, 0 or more",
        ),
        ({"total_steps": 0}, "total_steps=0, expected None or a whole number of steps, 1 or more"),
        ({"cooldown_steps": 5}, "cooldown_steps=5 without total_steps"),
        (
            {"total_steps": 10, "warmup_steps": 6, "cooldown_steps": 5},
            "warmup_steps=6 and cooldown_steps=5 are more than total_steps=10",
        ),
        ({"total_steps": 10, "warmup_steps": 11}, "warmup_steps=11 and .* more than"),
        ({"total_steps": 10, "cooldown_steps": 11}, "cooldown_steps=11 are more than"),
        ({"patience": -1}, "patience=-1, expected a whole number of windows, 0 or more"),
        ({"threshold": 1.0}, "threshold=1.0, expected a number in"),
        ({"threshold": "1e-4"}, "threshold='1e-4', expected a number in"),
        ({"report_every": 0}, "report_every=0, expected a whole number of steps, 1 or more"),
        ({"wire": "fp16"}, "wire='fp16', expected None"),
    ],
    ids=str,
)
def test_arguments_that_mean_nothing(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        offbeat.daso(**arguments)


@pytest.mark.fault(
    "report_loss() gets more than one number", "ValueError", group="Settings and arguments"
)
def test_a_loss_is_one_number() -> None:
    def worker(world: World) -> None:
        replica = offbeat.replicate(Quadratic(), offbeat.daso(), mesh=world)
        replica.report_loss(torch.ones(1))
        with pytest.raises(ValueError, match=r"shape \(2,\), expected one number"):
            replica.report_loss(torch.ones(2))
        replica.detach()

    ThreadWorld(nodes=TWO_BY_TWO).run(worker)


def test_the_problem_pulls_nodes_apart() -> None:
    """Otherwise no trajectory above would tell a merge from none."""
    assert np.abs(OPTIMA[0] - OPTIMA[2]).max() > 1
