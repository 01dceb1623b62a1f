"""Gossip between outer steps of the exact average: what equals what, resumption, errors."""

import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

import offbeat
from offbeat.methods import Average, SlowMomentum
from offbeat.testing import ThreadWorld, simulate
from offbeat.topology.graph import Peers, Topology
from offbeat.transport.world import World
from problems import START, Quadratic, flat, gradient, loss
from reference.participants import Array, Nodes
from reference.push_sum import irregular
from reference.slow_momentum import slow_momentum

RANKS: Nodes = ((0,), (1,), (2,))
UNEQUAL: Nodes = ((0, 1, 2), (3, 4), (5, 6))  # rank 2 only receives
RANKS_AND_NODES = [pytest.param(RANKS, id="ranks"), pytest.param(UNEQUAL, id="nodes")]


@dataclass(frozen=True)
class Irregular(Topology):
    """The graph of the reference ``irregular``, on which weights differ from one by tenths."""

    def peers(self, rank: int, size: int, index: int) -> Peers:
        matrix = irregular(size, index)
        others = [i for i in range(size) if i != rank]
        send = tuple((i, float(matrix[i, rank])) for i in others if matrix[i, rank] > 0)
        receive = tuple(j for j in others if matrix[rank, j] > 0)
        return Peers(send, receive, float(matrix[rank, rank]))

    def period(self, size: int) -> int:
        return 1


def recipe(nodes: Nodes, **settings: Any) -> offbeat.Algorithm:
    return offbeat.sgp(within="local" if nodes == UNEQUAL else None, **settings)


# ---- what equals what ---------------------------------------------------------------------------


@pytest.mark.parametrize(("nodes", "overlap"), [(RANKS, 0), (RANKS, 2), (UNEQUAL, 1)], ids=str)
def test_weights_in_flight_and_of_irregular_graphs_count(nodes: Nodes, overlap: int) -> None:
    outer = {"outer": "SGD(lr=0.9, momentum=0.5)", "outer_every": 5}
    runs = simulate(
        recipe(nodes, topology=Irregular(), overlap=overlap, **outer),
        Quadratic,
        loss,
        steps=23,
        nodes=nodes,
        optimizer=lambda parameters: SGD(parameters, lr=0.1, momentum=0.9),
    )
    ours = np.array([[flat(s) for s in run] for run in runs]).swapaxes(0, 1)
    theirs = slow_momentum(
        START,
        gradient,
        matrix=irregular,
        nodes=nodes,
        steps=23,
        every=5,
        lr=0.1,
        momentum=0.9,
        alpha=0.9,
        beta=0.5,
        overlap=overlap,
        within_local=nodes == UNEQUAL,
    )
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("nodes", "settings"),
    [
        (RANKS, {"topology": "ring"}),
        (RANKS, {"topology": Irregular(), "overlap": 1}),
        (UNEQUAL, {"overlap": 2, "wire": "bf16"}),
        (UNEQUAL, {"topology": Irregular(), "biased": True}),
    ],
    ids=str,
)
def test_a_rate_of_one_without_momentum_is_gossip_with_finish(
    nodes: Nodes, settings: dict[str, Any]
) -> None:
    """Bit for bit: also the rest of the mass that finish() finds in flight is the same."""
    plain = run(recipe(nodes, **settings), nodes, finish_every=3)
    stepped = run(recipe(nodes, outer="SGD(lr=1)", outer_every=3, **settings), nodes)
    np.testing.assert_array_equal(stepped, plain)
    assert np.ptp(plain[:, 2], axis=0).max() == 0 < np.ptp(plain[:, 3], axis=0).max()


def test_so_it_is_in_float32_but_for_the_rounding_of_sums() -> None:
    plain = run(recipe(RANKS, overlap=1), RANKS, finish_every=3, dtype=torch.float32)
    slow = recipe(RANKS, overlap=1, outer="SGD(lr=1)", outer_every=3)
    stepped = run(slow, RANKS, dtype=torch.float32)
    np.testing.assert_allclose(stepped, plain, rtol=0, atol=1e-5)


def test_a_slice_of_several_dtypes_is_averaged_whole() -> None:
    """Sums of both are float32: a rank's slice of them is not its slice of the messages."""
    algorithm = recipe(UNEQUAL, topology=Irregular(), outer="SGD(lr=1)", outer_every=2)

    def worker(world: World) -> list[list[float]]:
        model = Quadratic(torch.float32)
        model.matrix = nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
        between = offbeat.Algorithm(parameters=algorithm.parameters)
        replica = offbeat.replicate(model, between, mesh=world)
        with torch.no_grad():
            model.matrix += 4.0 * world.node
            model.vector.fill_(4.0 * world.node)
        replica.step()
        replica.step()
        return [p.detach().float().flatten().tolist() for p in (model.matrix, model.vector)]

    for matrix, vector in ThreadWorld(nodes=UNEQUAL).run(worker):
        np.testing.assert_allclose(vector, [4.0] * 3, rtol=0, atol=1e-5)
        # Messages of gossip round to bf16, whose spacing at 4 is 0.03.
        np.testing.assert_allclose(matrix, [4.0] * 6, rtol=0, atol=0.03)


def test_one_step_on_the_complete_graph_is_diloco() -> None:
    """What remains is the mean of equal models: gossip has averaged them."""
    outer = "SGD(lr=0.7, momentum=0.9, nesterov=True)"
    ours = run(offbeat.sgp("complete", outer=outer, outer_every=1), RANKS)
    theirs = run(offbeat.diloco(every=1), RANKS)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)


def test_16_bit_parameters_carry_what_rounding_takes() -> None:
    """Outer steps of half the spacing of bfloat16: parameters are those of the anchor, rounded."""

    def worker(world: World) -> list[float]:
        model = Quadratic(torch.bfloat16)
        with torch.no_grad():
            model.vector.fill_(1.0)
        algorithm = offbeat.sgp(outer="SGD(lr=0.5)", outer_every=1)
        replica = offbeat.replicate(model, algorithm, mesh=world)
        seen = []
        for _ in range(16):
            with torch.no_grad():
                model.vector += 2**-7  # the spacing at 1
            replica.step()
            seen.append(float(model.vector.detach()[0]))
        return seen

    expected = [float(torch.tensor(1 + step * 2**-8).bfloat16()) for step in range(1, 17)]
    assert ThreadWorld(size=2).run(worker) == [expected] * 2


# ---- the state ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("nodes", "steps"), [(RANKS, 1), (RANKS, 4), (RANKS, 6), (UNEQUAL, 7)])
def test_resumes_at_any_step(nodes: Nodes, steps: int) -> None:
    """Messages of gossip are in flight in all of them but after the averages, 4 and 8."""
    algorithm = recipe(
        nodes, topology=Irregular(), overlap=1, wire="bf16", outer="Adam(lr=0.05)", outer_every=4
    )

    def worker(world: World) -> None:
        model = Quadratic(torch.float32)
        replica = offbeat.replicate(model, algorithm, mesh=world)
        optimizer = Adam(model.parameters(), lr=0.1)
        train(model, replica, optimizer, steps)
        in_flight = replica.parameters.gossip.pending is not None
        assert in_flight == (steps % 4 != 0 and not (nodes == UNEQUAL and world.rank == 2))
        file = io.BytesIO()
        torch.save([replica.state_dict(), optimizer.state_dict()], file)
        train(model, replica, optimizer, 9)
        replica.detach()
        file.seek(0)
        saved, moments = torch.load(file, weights_only=True)
        again = Quadratic(torch.float32)
        resumed = offbeat.replicate(again, algorithm, mesh=world)
        train(again, resumed, SGD(again.parameters(), lr=0.1), 6)  # must leave no trace
        resumed.load_state_dict(saved)
        optimizer = Adam(again.parameters(), lr=0.1)
        optimizer.load_state_dict(moments)
        train(again, resumed, optimizer, 9)
        resumed.detach()
        for ours, theirs in zip(again.parameters(), model.parameters(), strict=True):
            assert torch.equal(ours, theirs)

    ThreadWorld(nodes=nodes).run(worker)


def test_gossip_starts_anew_after_every_average() -> None:
    def worker(world: World) -> list[tuple[float, bool, int]]:
        model = Quadratic()
        algorithm = offbeat.sgp(overlap=1, outer="SGD(lr=1, momentum=0.5)", outer_every=3)
        replica = offbeat.replicate(model, algorithm, mesh=world)
        seen = []
        for _ in range(6):
            train(model, replica, SGD(model.parameters(), lr=0.1), 1)
            gossip = replica.parameters.gossip
            age = replica.stats()["last"]["staleness"]
            seen.append((gossip.weight, gossip.pending is None, age))
        replica.consensus_distance()  # nobody leaves while others wait in their last step
        return seen

    cycle = [(0.5, False, 1), (0.75, False, 1), (1.0, True, 0)]
    assert ThreadWorld(size=2).run(worker) == [cycle + cycle] * 2


def test_after_finish_a_run_goes_on_as_a_new_one() -> None:
    algorithm = offbeat.sgp(overlap=1, outer="SGD(lr=1, momentum=0.5)", outer_every=4)

    def worker(world: World, anew: bool) -> Array:
        model = Quadratic()
        replica = offbeat.replicate(model, algorithm, mesh=world)
        optimizer = SGD(model.parameters(), lr=0.1)
        train(model, replica, optimizer, 8)
        replica.finish()
        if anew:
            replica.detach()
            replica = offbeat.replicate(model, algorithm, mesh=world)
        train(model, replica, optimizer, 8)
        replica.detach()
        return values(model)

    world = ThreadWorld(size=2)
    expected = world.run(lambda world: worker(world, anew=True))
    np.testing.assert_array_equal(world.run(lambda world: worker(world, anew=False)), expected)


def test_an_average_costs_two_models_less_their_nth_part() -> None:
    def worker(world: World) -> list[int]:
        model = nn.Linear(128, 96, bias=False)
        algorithm = offbeat.sgp(wire="bf16", outer="SGD(lr=1)", outer_every=2)
        replica = offbeat.replicate(model, algorithm, mesh=world)
        sent = []
        for _ in range(4):
            replica.step()
            sent.append(int(replica.stats()["last"]["bytes_sent"]))
        return sent

    for _, _, gossip, both in ThreadWorld(size=3).run(worker):  # the first step compares ranks
        assert gossip == 128 * 96 * 2 + 16
        assert 0 <= both - gossip - 2 * 2 / 3 * 128 * 96 * 4 < 500  # and a gather of weights


# ---- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"outer_every": 3}, "outer_every=3 without outer: .* outer='SGD"),
        ({"outer": "SGD(lr=1)", "outer_every": 0}, "outer_every=0, expected None or a whole num"),
        ({"outer": "Muon(lr=0.1)"}, "expected one of SGD, Adam, .* treat every element"),
        ({"outer": 3}, "outer=3, expected a str .* or a callable"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        offbeat.sgp(**settings)


def test_only_push_sum_gossips() -> None:
    with pytest.raises(ValueError, match="expected a PushSum"):
        SlowMomentum(gossip=Average())  # type: ignore[arg-type]


def test_texts_are_read_and_written() -> None:
    found = offbeat.algorithm("sgp('ring', outer='SGD(lr=1, momentum=0.6)', outer_every=12)")
    assert found == offbeat.sgp("ring", outer="SGD(lr=1, momentum=0.6)", outer_every=12)
    assert repr(found.parameters).startswith("SlowMomentum(gossip=PushSum(topology=Ring(), ")
    assert repr(found.parameters).endswith("outer='SGD(lr=1, momentum=0.6)', every=12)")
    named = repr(offbeat.sgp(outer=torch.optim.Adagrad))
    assert "outer=Adagrad, every=48" in named  # no address: ranks compare this


@pytest.mark.fault(
    "a model file is loaded after replicate() under sgp(outer=...)",
    "ValueError on all ranks in the first step, unless finish() came between",
    group="Models and algorithms",
)
def test_a_model_that_is_loaded_late_needs_finish() -> None:
    def worker(world: World, finish: bool) -> None:
        model = Quadratic()
        replica = offbeat.replicate(model, offbeat.sgp(outer="SGD(lr=1)"), mesh=world)
        with torch.no_grad():
            model.vector += 1
        if finish:
            replica.finish()
        train(model, replica, SGD(model.parameters(), lr=0.1), 1)
        replica.consensus_distance()

    def refused(world: World) -> None:
        with pytest.raises(ValueError, match=r"written to after replicate.*call finish"):
            worker(world, finish=False)

    ThreadWorld(size=2).run(refused)
    ThreadWorld(size=2).run(lambda world: worker(world, finish=True))


@pytest.mark.parametrize("nodes", RANKS_AND_NODES)
@pytest.mark.fault(
    "a rank diverges under sgp(outer=...)",
    "ValueError on all ranks; names the rank and the parameter; the anchor keeps its value",
    group="Gradients",
)
def test_an_average_that_is_not_finite_is_an_error_on_all(nodes: Nodes) -> None:
    algorithm = recipe(nodes, overlap=1, outer="SGD(lr=1)", outer_every=2)

    def worker(world: World) -> None:
        model = Quadratic()
        replica = offbeat.replicate(model, algorithm, mesh=world)
        optimizer = SGD(model.parameters(), lr=0.1)
        train(model, replica, optimizer, 1)
        loss(model, world.rank, 1).backward()
        optimizer.step()
        if world.node == 0:
            with torch.no_grad():
                model.vector[1] = torch.nan
        with pytest.raises(ValueError, match=r"rank \d: parameter 'vector' is not finite"):
            replica.step()
        assert all(anchor.isfinite().all() for anchor in replica.parameters.model.anchor)

    ThreadWorld(nodes=nodes).run(worker)


def run(
    algorithm: offbeat.Algorithm,
    nodes: Nodes,
    *,
    finish_every: int = 1000,
    dtype: Any = torch.float64,
) -> Array:
    """Parameters of every rank after every step; (ranks, steps, d)."""

    def worker(world: World) -> list[Array]:
        model = Quadratic(dtype)
        replica = offbeat.replicate(model, algorithm, mesh=world)
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        seen = []
        for step in range(1, 12):
            train(model, replica, optimizer, 1)
            if step % finish_every == 0:
                replica.finish()
            seen.append(values(model))
        replica.detach()
        return seen

    return np.array(ThreadWorld(nodes=nodes).run(worker))


def train(
    model: nn.Module, replica: offbeat.Replica, optimizer: torch.optim.Optimizer, steps: int
) -> None:
    for step in range(steps):
        loss(model, replica.world.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        replica.step()


def values(model: nn.Module) -> Array:
    parts = [p.detach().double().reshape(-1) for p in model.parameters() if p.requires_grad]
    return torch.cat(parts).numpy()
