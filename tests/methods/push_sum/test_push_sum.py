"""Push-sum on graphs where the weight matters, against the float64 reference."""

import copy
import io
import math
import re
from dataclasses import dataclass
from typing import Any

import networkx
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

import offbeat
from offbeat.methods import Mean, PushSum
from offbeat.testing import ThreadWorld, simulate, snapshot
from offbeat.topology.graph import Peers, Topology, mixing_matrix, validate
from offbeat.transport.world import World
from problems import DIMENSION, START, Quadratic, flat, gradient, loss
from reference.participants import Array, Nodes
from reference.push_sum import Matrix, irregular, mix, one_peer_exponential, sgp

LR, MOMENTUM, STEPS = 0.1, 0.9, 20
UNEQUAL: Nodes = ((0, 1, 2), (3,), (4, 5))
TWO_SLICES: Nodes = ((0, 1, 2), (3, 4), (5, 6))


@dataclass(frozen=True)
class Irregular(Topology):
    """Ring j -> j+1 with the chord 0 -> 2: participant 0 gives thirds, the others halves."""

    def peers(self, rank: int, size: int, index: int) -> Peers:
        column = irregular(size, index)[:, rank]
        row = irregular(size, index)[rank]
        others = [i for i in range(size) if i != rank]
        send = tuple((i, float(column[i])) for i in others if column[i] > 0)
        return Peers(send, tuple(j for j in others if row[j] > 0), float(column[rank]))

    def period(self, size: int) -> int:
        return 1


@dataclass(frozen=True)
class Varying(Topology):
    """Another graph at every exchange, every share another one: one peer, then all, then few."""

    def peers(self, rank: int, size: int, index: int) -> Peers:
        matrix = varying(size, index)
        others = [i for i in range(size) if i != rank]
        send = tuple((i, float(matrix[i, rank])) for i in others if matrix[i, rank] > 0)
        receive = tuple(j for j in others if matrix[rank, j] > 0)
        return Peers(send, receive, float(matrix[rank, rank]))

    def period(self, size: int) -> int:
        return 3


def varying(size: int, index: int) -> Array:
    """A ring of unequal shares, a full matrix of random shares, the ring backwards."""
    random = np.random.default_rng(index % 3)
    full: Array = random.uniform(0.1, 1.0, size=(size, size))
    hop = {0: 1, 2: -1}.get(index % 3)
    if hop is not None:
        full *= np.eye(size) + np.roll(np.eye(size), hop, axis=0)
    columns: Array = full / full.sum(0)
    return columns


@dataclass(frozen=True)
class Turns(Topology):
    """Neighbours average pair by pair; the others of an exchange send and receive nothing."""

    def peers(self, rank: int, size: int, index: int) -> Peers:
        """Return the partner in the pair of this exchange."""
        first = index % (size - 1)
        if rank not in (first, first + 1):
            return Peers((), (), 1.0)
        partner = 2 * first + 1 - rank
        return Peers(((partner, 0.5),), (partner,), 0.5)

    def period(self, size: int) -> int:
        """Return the number of pairs."""
        return size - 1


def turns(size: int, index: int) -> Array:
    """The mean of the two neighbours whose turn it is."""
    first, mixed = index % (size - 1), np.eye(size)
    mixed[first : first + 2, first : first + 2] = 0.5
    return mixed


TOPOLOGIES: dict[Topology, Matrix] = {
    Irregular(): irregular, Varying(): varying, Turns(): turns
}  # fmt: skip
either_layout = pytest.mark.parametrize(
    ("topology", "nodes"),
    [(Irregular(), None), (Varying(), UNEQUAL)],
    ids=["irregular ranks", "varying nodes"],
)
every_topology = pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda t: type(t).__name__)


def algorithm(topology: Topology, nodes: Nodes | None = None) -> offbeat.Algorithm:
    """Push-sum between ranks or, where there are nodes, between them."""
    if nodes is None:
        return offbeat.sgp(topology)
    return offbeat.Algorithm(Mean(over="local"), PushSum(topology=topology, over="node"))


def sgd(parameters: Any) -> SGD:
    return SGD(parameters, lr=LR, momentum=MOMENTUM)


def train(model: nn.Module, replica: offbeat.Replica, rank: int, optimizer: Any, n: int) -> None:
    for step in range(n):
        loss(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        replica.step()


@every_topology
def test_the_topologies_here_are_what_they_say(topology: Topology) -> None:
    for size in (3, 5):
        validate(topology, size)
        for index in range(4):
            expected = TOPOLOGIES[topology](size, index)
            assert np.array_equal(mixing_matrix(topology, size, index), expected)


@pytest.mark.parametrize(
    ("topology", "size"),
    [(Irregular(), 2), (Irregular(), 3), (Varying(), 4)],
    ids=lambda value: str(value).removesuffix("()"),
)
def test_follows_the_reference_with_momentum(topology: Topology, size: int) -> None:
    nodes = tuple((rank,) for rank in range(size))
    runs = simulate(algorithm(topology), Quadratic, loss, steps=STEPS, size=size, optimizer=sgd)
    ours = np.array([[flat(s) for s in run] for run in runs]).swapaxes(0, 1)
    theirs, weights = reference(topology, nodes)
    # float64 throughout; weights differ from one by tenths, so that scale is that of the model.
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)
    assert size == 2 or np.abs(weights[-1] - 1).max() > 0.05, "the weight matters"


def reference(
    topology: Topology, nodes: Nodes, steps: int = STEPS, within_local: bool = False
) -> tuple[Array, Array]:
    return sgp(
        START,
        gradient,
        matrix=TOPOLOGIES[topology],
        nodes=nodes,
        steps=steps,
        lr=LR,
        momentum=MOMENTUM,
        within_local=within_local,
    )


@pytest.mark.parametrize(
    ("topology", "nodes"),
    [(Irregular(), UNEQUAL), (Varying(), TWO_SLICES)],
    ids=["one slice", "two slices"],
)
def test_unequal_nodes_follow_the_reference(topology: Topology, nodes: Nodes) -> None:
    """Every rank of a node de-biases with the node's weight, also those that only receive."""
    runs = simulate(
        algorithm(topology, nodes), Quadratic, loss, steps=STEPS, nodes=nodes, optimizer=sgd
    )
    ours = np.array([[flat(s) for s in run] for run in runs]).swapaxes(0, 1)
    theirs, _ = reference(topology, nodes, within_local=True)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)
    for node in nodes:
        for rank in node:
            assert np.array_equal(ours[:, rank], ours[:, node[0]]), "a node holds one model"


@either_layout
def test_mass_is_conserved_and_the_true_mean_is_reached(
    topology: Topology, nodes: Nodes | None
) -> None:
    """An optimizer that does nothing: gossip alone goes to the mean, from unequal starts."""
    layout = nodes or tuple((rank,) for rank in range(5))

    def worker(world: World) -> tuple[Array, Array, Array]:
        model = Quadratic()
        replica = offbeat.replicate(
            model, offbeat.Algorithm(parameters=algorithm(topology, nodes).parameters), mesh=world
        )
        with torch.no_grad():
            model.matrix += world.node**2
        state, z, w, x = replica.parameters, [], [], []
        for _ in range(60):
            z.append(flat(snapshot(model)))
            w.append(state.weight)
            # The numerator of this moment, computed apart from the package: x = w z, because z
            # has not moved since the last exchange; before the first, w is one.
            x.append(w[-1] * z[-1])
            replica.step()
        replica.detach()
        return np.array(z), np.array(w), np.array(x)

    heads = [node[0] for node in layout]
    runs = ThreadWorld(nodes=layout).run(worker)
    z = np.array([runs[rank][0] for rank in heads])
    w = np.array([runs[rank][1] for rank in heads])
    x = np.array([runs[rank][2] for rank in heads])
    assert np.abs(w - 1).max() > 0.1
    size = len(layout)
    # 60 exchanges, each with a few roundings of numbers below 20.
    np.testing.assert_allclose(w.sum(0), size, rtol=0, atol=60 * size * 4e-16)
    np.testing.assert_allclose(x.sum(0), np.tile(x[:, 0].sum(0), (60, 1)), rtol=0, atol=1e-12)
    mean = z[:, 0].mean(0)
    np.testing.assert_allclose(z[:, -1], np.tile(mean, (size, 1)), rtol=0, atol=1e-6)
    assert np.abs(x[:, -1] - mean).max() > 0.1, "the numerator alone goes elsewhere"


def test_weights_follow_the_matrices() -> None:
    size = 4

    def worker(world: World) -> list[float]:
        replica = offbeat.replicate(Quadratic(), offbeat.sgp(Irregular()), mesh=world)
        weights = []
        for _ in range(6):
            replica.step()
            weights.append(replica.parameters.weight)
        replica.detach()
        return weights

    ours = np.array(ThreadWorld(size).run(worker)).T
    w = np.ones(size)
    for row in ours:
        _, w = mix(irregular(size, 0), np.zeros((size, 1)), w)
        np.testing.assert_allclose(row, w, rtol=1e-15)


def test_the_anchor_is_the_model_before_the_step() -> None:
    """Stored where weights vary, right after every step and after ``finish``."""

    def worker(world: World) -> None:
        model = Quadratic()
        replica = offbeat.replicate(model, offbeat.sgp(Irregular()), mesh=world)
        state = replica.parameters
        optimizer = sgd(model.parameters())
        for _ in range(3):
            check_anchor(model, state)
            train(model, replica, world.rank, optimizer, 1)
        check_anchor(model, state)
        assert state.weight != 1.0
        replica.finish()
        assert state.weight == 1.0
        check_anchor(model, state)
        replica.detach()

    ThreadWorld(4).run(worker)


def check_anchor(model: nn.Module, state: Any) -> None:
    anchors = state.layout.views(state.anchor)
    assert sorted(anchors) == ["matrix", "vector"], "a frozen parameter needs none"
    assert all(torch.equal(anchors[name], model.get_parameter(name)) for name in anchors)


@pytest.mark.parametrize(
    ("topology", "size"), [(offbeat.Exponential(), 2), (offbeat.Ring(), 5)], ids=str
)
def test_regular_graphs_store_no_anchor_and_keep_the_weight(topology: Topology, size: int) -> None:
    def worker(world: World) -> None:
        model = Quadratic()
        replica = offbeat.replicate(model, offbeat.sgp(topology), mesh=world)
        train(model, replica, world.rank, sgd(model.parameters()), 10)
        assert replica.parameters.anchor is None
        assert "anchor" not in replica.state_dict()[f"rank{world.rank}"]["parameters"]
        # Thirds do not add up exactly: one rounding an exchange.
        assert abs(replica.parameters.weight - 1) < 1e-14
        replica.detach()

    ThreadWorld(size).run(worker)


@either_layout
def test_save_and_load_midway_is_bit_equal_with_other_weights(
    topology: Topology, nodes: Nodes | None
) -> None:
    dtype = torch.float32 if nodes else torch.bfloat16

    def worker(world: World) -> None:
        model = Quadratic(dtype)
        replica = offbeat.replicate(model, algorithm(topology, nodes), mesh=world)
        optimizer = Adam(model.parameters(), lr=LR)
        train(model, replica, world.rank, optimizer, 4)
        weight = replica.parameters.weight
        file = io.BytesIO()
        torch.save([replica.state_dict(), optimizer.state_dict()], file)
        train(model, replica, world.rank, optimizer, 5)
        replica.detach()

        file.seek(0)
        saved, momenta = torch.load(file, weights_only=True)
        again = Quadratic(dtype)
        with torch.no_grad():
            again.vector += 3  # whatever was there before is gone
        resumed = offbeat.replicate(again, algorithm(topology, nodes), mesh=world)
        train(again, resumed, world.rank, sgd(again.parameters()), 2)
        resumed.load_state_dict(saved)
        assert resumed.parameters.weight == weight
        optimizer = Adam(again.parameters(), lr=LR)
        optimizer.load_state_dict(momenta)
        train(again, resumed, world.rank, optimizer, 5)
        assert resumed.parameters.weight == replica.parameters.weight
        resumed.detach()
        for name, ours in again.named_parameters():
            assert torch.equal(ours, model.get_parameter(name)), name

    layout = nodes or tuple((rank,) for rank in range(4))
    ThreadWorld(nodes=layout).run(worker)


@either_layout
def test_consensus_weighs_every_replica_and_changes_no_trajectory(
    topology: Topology, nodes: Nodes | None
) -> None:
    """It shows sum x / sum w in the middle of a step's work: an update is not yet de-biased."""
    layout = nodes or tuple((rank,) for rank in range(4))

    def worker(world: World, look: bool) -> tuple[Array, Array]:
        model = Quadratic()
        replica = offbeat.replicate(model, algorithm(topology, nodes), mesh=world)
        optimizer = sgd(model.parameters())
        shown = np.zeros(DIMENSION)
        for _ in range(4):
            train(model, replica, world.rank, optimizer, 1)
            loss(model, world.rank, 0).backward()
            optimizer.step()  # stepped, not yet exchanged
            optimizer.zero_grad()
            if look:
                with replica.consensus():
                    shown = flat(snapshot(model))
            replica.step()
        after = flat(snapshot(model))
        replica.detach()
        return after, shown

    world = ThreadWorld(nodes=layout)
    looked = world.run(lambda world: worker(world, look=True))
    unseen = world.run(lambda world: worker(world, look=False))
    for (a, _), (b, _) in zip(looked, unseen, strict=True):
        assert np.array_equal(a, b)
    # Mass does not change in the exchange that follows, so the reference's average after it is
    # the one that was shown before it.
    z, w = reference(topology, layout, steps=8, within_local=nodes is not None)
    heads = [node[0] for node in layout]
    average = (z[-1] * w[-1][:, None])[heads].sum(0) / w[-1][heads].sum()
    for _, shown in looked:
        np.testing.assert_allclose(shown, average, rtol=0, atol=1e-12)


@every_topology
def test_finish_starts_anew_from_the_weighted_average(topology: Topology) -> None:
    size = 4
    nodes = tuple((rank,) for rank in range(size))

    def worker(world: World) -> tuple[Array, Array]:
        model = Quadratic()
        replica = offbeat.replicate(model, offbeat.sgp(topology), mesh=world)
        train(model, replica, world.rank, sgd(model.parameters()), 7)
        replica.finish()
        finished = flat(snapshot(model))
        assert replica.steps == 7, "counters go on"
        train(model, replica, world.rank, sgd(model.parameters()), 3)
        replica.detach()
        return finished, flat(snapshot(model))

    runs = ThreadWorld(size).run(worker)
    z, w = reference(topology, nodes, steps=7)
    average = (z[-1] * w[-1][:, None]).sum(0) / size
    for finished, _ in runs:
        np.testing.assert_allclose(finished, average, rtol=0, atol=1e-12)
    again, _ = sgp(
        average,
        gradient,
        matrix=lambda n, index: TOPOLOGIES[topology](n, index + 7),
        nodes=nodes,
        steps=3,
        lr=LR,
        momentum=MOMENTUM,
    )
    np.testing.assert_allclose([after for _, after in runs], again[-1], rtol=0, atol=1e-12)


def test_another_algorithms_finished_state_starts_anew() -> None:
    """Also in a replica that has trained already: its weight and anchor are no longer true."""

    def worker(world: World) -> tuple[Array, Array]:
        other = Quadratic()
        source = offbeat.replicate(other, offbeat.local_sgd(every=2), mesh=world)
        train(other, source, world.rank, sgd(other.parameters()), 3)
        source.finish()
        saved = source.state_dict()
        source.detach()
        model = Quadratic()
        replica = offbeat.replicate(model, offbeat.sgp(Irregular()), mesh=world)
        train(model, replica, world.rank, sgd(model.parameters()), 3)
        replica.load_state_dict(saved)
        for _ in range(3):
            replica.step()
        replica.detach()
        return flat(snapshot(model)), flat(snapshot(other))

    for mixed, saved in ThreadWorld(3).run(worker):
        # Equal replicas stay equal, up to the roundings of three exchanges.
        np.testing.assert_allclose(mixed, saved, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("old", "new"), [(2, 3), (3, 2)])
def test_a_finished_state_moves_between_a_regular_and_an_irregular_world(
    old: int, new: int
) -> None:
    """Of two, this graph is regular and stores no anchor; of three it is not, and must."""
    saved: list[Any] = []

    def save(world: World) -> None:
        model = Quadratic()
        replica = offbeat.replicate(model, offbeat.sgp(Irregular()), mesh=world)
        train(model, replica, world.rank, sgd(model.parameters()), 3)
        replica.finish()
        if world.rank == 0:
            saved.append(replica.state_dict())
        replica.detach()

    def resume(world: World) -> Array:
        model = Quadratic()
        replica = offbeat.replicate(model, offbeat.sgp(Irregular()), mesh=world)
        replica.load_state_dict(saved[0])
        for _ in range(3):
            replica.step()
        replica.detach()
        return flat(snapshot(model))

    ThreadWorld(old).run(save)
    expected = flat({**saved[0]["rank0"]["model"]})
    for found in ThreadWorld(new).run(resume):
        # Equal replicas stay equal, up to the roundings of three exchanges.
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-14)


@dataclass(frozen=True)
class TakingTurns(Topology):
    """Two of three talk, the third has nobody to send to and nobody to wait for."""

    def peers(self, rank: int, size: int, index: int) -> Peers:
        pair = ((0, 1), (1, 2))[index % 2]
        if rank not in pair:
            return Peers((), (), 1.0)
        (other,) = set(pair) - {rank}
        return Peers(((other, 0.5),), (other,), 0.5)

    def period(self, size: int) -> int:
        return 2


def test_a_participant_may_have_no_peers_in_an_exchange() -> None:
    def worker(world: World) -> list[float]:
        model = Quadratic()
        replica = offbeat.replicate(model, offbeat.sgp(TakingTurns()), mesh=world)
        with torch.no_grad():
            model.vector.fill_(8.0 * world.rank)
        seen = []
        for _ in range(3):
            replica.step()
            seen.append(model.vector[0].item())
        replica.detach()
        return seen

    assert ThreadWorld(3).run(worker) == [
        [4.0, 4.0, 7.0],
        [4.0, 10.0, 7.0],
        [16.0, 10.0, 10.0],
    ]


def test_an_update_is_added_unscaled_whatever_the_weight() -> None:
    """The paper's x - lr g: with w != 1 a step of one moves z by 1/w after the exchange."""
    size = 3

    def worker(world: World) -> tuple[float, Array]:
        model = Quadratic()
        replica = offbeat.replicate(model, offbeat.sgp(Irregular()), mesh=world)
        for _ in range(3):
            replica.step()
        weight = replica.parameters.weight
        if world.rank == 1:
            with torch.no_grad():
                model.vector += 1.0
        replica.finish()
        replica.detach()
        return weight, model.vector.detach().numpy() - START[6:]

    runs = ThreadWorld(size).run(worker)
    assert abs(runs[1][0] - 1) > 0.05
    for _, moved in runs:
        np.testing.assert_allclose(moved, 1.0 / size, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_peer_costs_one_model_and_a_header(dtype: torch.dtype) -> None:
    def worker(world: World) -> dict[str, Any]:
        model = Quadratic(dtype)
        replica = offbeat.replicate(model, offbeat.sgp(), mesh=world)
        train(model, replica, world.rank, sgd(model.parameters()), 2)
        replica.detach()
        return replica.stats()["last"]

    for last in ThreadWorld(2).run(worker):
        assert last["bytes_sent"] == DIMENSION * dtype.itemsize + 16
        assert last["staleness"] == 0


def test_every_peer_costs_one_more() -> None:
    def worker(world: World) -> int:
        model = Quadratic()
        replica = offbeat.replicate(model, offbeat.sgp(Irregular()), mesh=world)
        for _ in range(2):  # the first also compares the ranks
            replica.step()
        replica.detach()
        return int(replica.stats()["last"]["bytes_sent"])

    one = DIMENSION * 8 + 16
    assert ThreadWorld(4).run(worker) == [2 * one, one, one, one]


def test_between_nodes_every_rank_sends_its_slice() -> None:
    """A node puts one model on the wire, rounded up to whole slices."""

    def worker(world: World) -> int:
        model = Quadratic()
        replica = offbeat.replicate(model, offbeat.sgp(within="local"), mesh=world)
        train(model, replica, world.rank, sgd(model.parameters()), 1)
        before = dict(replica.stats()["bytes_by_axis"])
        train(model, replica, world.rank, sgd(model.parameters()), 1)
        after = replica.stats()["bytes_by_axis"]
        replica.detach()
        return int(after.get("node", 0) - before.get("node", 0))

    half = -(-DIMENSION // 2) * 8 + 16
    assert ThreadWorld(nodes=TWO_SLICES).run(worker) == [half, half, 0, half, half, half, half]


def test_large_models_travel_in_pieces() -> None:
    """Several pieces of 1 MiB and a rest, in two dtypes; one exchange of two is their mean."""
    numel = 2 * 2**18 + 12345

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.whole = nn.Parameter(torch.arange(numel, dtype=torch.float32) % 1024)
            self.rounded = nn.Parameter((torch.arange(numel) % 128).bfloat16())

    def worker(world: World) -> tuple[Tensor, Tensor]:
        model = Large()
        replica = offbeat.replicate(model, offbeat.sgp(), mesh=world)
        with torch.no_grad():
            model.whole.mul_(world.rank * 2.0)
            model.rounded.mul_(world.rank * 2.0)
        replica.step()
        replica.detach()
        return model.whole.detach(), model.rounded.detach()

    expected = Large()
    for whole, half in ThreadWorld(2).run(worker):
        assert torch.equal(whole, expected.whole)  # 0 and twice the start: exact halves
        assert torch.equal(half, expected.rounded)


@pytest.mark.parametrize("nodes", [None, UNEQUAL], ids=["ranks", "nodes"])
def test_parameters_of_odd_sizes(nodes: Nodes | None) -> None:
    """Without elements, with one, with no dimension, fewer than there are slices."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scalar = nn.Parameter(torch.tensor(1.0))
            self.empty = nn.Parameter(torch.zeros(0, 4))
            self.none = nn.Parameter(torch.zeros(3, 0, dtype=torch.bfloat16))
            self.one = nn.Parameter(torch.ones(1, 1, dtype=torch.float64))

    def worker(world: World) -> list[float]:
        model = Odd()
        replica = offbeat.replicate(
            model,
            offbeat.Algorithm(parameters=algorithm(Irregular(), nodes).parameters),
            mesh=world,
        )
        with torch.no_grad():
            model.scalar += world.node
            model.one += world.node
        for _ in range(3):
            replica.step()
        distance = replica.consensus_distance()["max"]
        replica.finish()
        replica.detach()
        return [model.scalar.item(), model.one.item(), distance]

    layout = nodes or ((0,), (1,), (2,))
    for scalar, one, distance in ThreadWorld(nodes=layout).run(worker):
        assert scalar == pytest.approx(2.0, abs=1e-6)
        assert one == pytest.approx(2.0, abs=1e-12)
        assert 0 < distance < 2


OVERLAPS = [
    (offbeat.Exponential(), one_peer_exponential, 1),
    (offbeat.Exponential(), one_peer_exponential, 3),
    (Irregular(), irregular, 1),
    (Varying(), varying, 2),
]
overlapped = pytest.mark.parametrize(
    ("topology", "matrix", "overlap"), OVERLAPS[1::2], ids=["tau 3", "varying"]
)


@pytest.mark.parametrize(
    ("topology", "matrix", "overlap", "biased"),
    [*((*each, False) for each in OVERLAPS), (*OVERLAPS[2], True)],
    ids=["one peer", "tau 3", "irregular", "varying", "biased"],
)
def test_overlap_follows_the_reference_with_delays(
    topology: Topology, matrix: Matrix, overlap: int, biased: bool
) -> None:
    """Every message arrives exactly tau steps after it was sent, whoever comes late."""
    size = 4
    random = np.random.default_rng(overlap)
    naps = random.uniform(0, 0.01, (size, STEPS))
    runs = simulate(
        offbeat.sgp(topology, overlap=overlap, biased=biased),
        Quadratic,
        loss,
        steps=STEPS,
        size=size,
        optimizer=sgd,
        delay=lambda rank, step: naps[rank, step],
    )
    ours = np.array([[flat(s) for s in run] for run in runs]).swapaxes(0, 1)
    theirs, _ = sgp(
        START,
        gradient,
        matrix=matrix,
        nodes=tuple((rank,) for rank in range(size)),
        steps=STEPS,
        lr=LR,
        momentum=MOMENTUM,
        overlap=overlap,
        biased=biased,
    )
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("topology", "matrix", "overlap", "wire"),
    [(*OVERLAPS[0], "bf16"), (*OVERLAPS[1], None), (*OVERLAPS[3], None)],
    ids=["one peer, bf16", "tau 3", "varying"],
)
def test_when_messages_come_changes_no_bit(
    topology: Topology,
    matrix: Matrix,
    overlap: int,
    wire: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Messages that were there in time are added in another order of work."""

    def run(prompt: float) -> list[dict[str, Tensor]]:
        monkeypatch.setattr("offbeat.methods.push_sum.bound._PROMPT", prompt)
        recipe = offbeat.sgp(topology, overlap=overlap, wire=wire)
        runs = simulate(
            recipe, lambda: Quadratic(torch.float32), loss, steps=9, size=4, optimizer=sgd
        )
        return [states[-1] for states in runs]

    for early, late in zip(run(math.inf), run(0.0), strict=True):
        for name, ours in early.items():
            assert torch.equal(ours, late[name]), name


def test_one_third_of_the_mass_is_in_flight() -> None:
    """With one peer w of a node settles at 2/3; with what is in flight it is 1 on average."""

    def worker(world: World) -> list[tuple[float, float, int]]:
        replica = offbeat.replicate(Quadratic(), offbeat.sgp(overlap=1), mesh=world)
        seen = []
        for _ in range(30):
            replica.step()
            state = replica.parameters
            state.pending.wait()
            weights = state.weight, state.pending.weight_arrived
            seen.append((*weights, replica.stats()["last"]["staleness"]))
        replica.detach()
        return seen

    runs = np.array(ThreadWorld(4).run(worker))
    np.testing.assert_allclose(runs[:, -1, 0], 2 / 3, rtol=0, atol=1e-8)
    np.testing.assert_allclose(runs[..., :2].sum((0, 2)), 4, rtol=0, atol=1e-12)
    assert (runs[..., 2] == 1).all()


@overlapped
def test_save_and_load_in_mid_flight_is_bit_equal(
    topology: Topology, matrix: Matrix, overlap: int
) -> None:
    text = offbeat.sgp(topology, overlap=overlap, wire="bf16")

    def worker(world: World) -> None:
        model = Quadratic(torch.float32)
        replica = offbeat.replicate(model, text, mesh=world)
        train(model, replica, world.rank, sgd(model.parameters()), 4)
        file = io.BytesIO()
        torch.save(replica.state_dict(), file)
        train(model, replica, world.rank, sgd(model.parameters()), 5)
        replica.detach()
        file.seek(0)
        again = Quadratic(torch.float32)
        resumed = offbeat.replicate(again, text, mesh=world)
        train(again, resumed, world.rank, sgd(again.parameters()), 2)
        resumed.load_state_dict(torch.load(file, weights_only=True))
        train(again, resumed, world.rank, sgd(again.parameters()), 5)
        resumed.detach()
        for name, ours in again.named_parameters():
            assert torch.equal(ours, model.get_parameter(name)), name

    ThreadWorld(4).run(worker)


@overlapped
def test_consensus_counts_what_is_in_flight_and_leaves_it_there(
    topology: Topology, matrix: Matrix, overlap: int
) -> None:
    """From unequal starts, without updates: the average is that of the starts at any moment."""

    def worker(world: World, look: bool) -> tuple[list[Array], Array, Array]:
        model = Quadratic()
        replica = offbeat.replicate(model, offbeat.sgp(topology, overlap=overlap), mesh=world)
        with torch.no_grad():
            model.vector += world.rank**2
        shown = []
        for _ in range(6):
            replica.step()
            if look:
                with replica.consensus():
                    shown.append(flat(snapshot(model)))
        after = flat(snapshot(model))
        replica.finish()
        replica.detach()
        return shown, after, flat(snapshot(model))

    world = ThreadWorld(4)
    looked = world.run(lambda world: worker(world, look=True))
    unseen = world.run(lambda world: worker(world, look=False))
    mean = START.copy()
    mean[6:] += np.mean(np.arange(4) ** 2)
    for (shown, after, end), (_, plain, _) in zip(looked, unseen, strict=True):
        assert np.array_equal(after, plain)
        np.testing.assert_allclose(shown, [mean] * 6, rtol=0, atol=1e-13)
        np.testing.assert_allclose(end, mean, rtol=0, atol=1e-13)


@pytest.mark.parametrize("overlap", [0, 1])
def test_16_bit_messages_lose_no_mass_and_no_small_updates(overlap: int) -> None:
    """Updates of 1e-4 on parameters near 4, where bf16 has a spacing of 2^-6: they all count."""
    size, steps = 4, 50

    def worker(world: World) -> Array:
        model = Quadratic(torch.float64)
        algorithm = offbeat.sgp(overlap=overlap, wire="bf16")
        replica = offbeat.replicate(model, algorithm, mesh=world)
        with torch.no_grad():
            model.vector += 4.0
        for _ in range(steps):
            with torch.no_grad():
                model.vector += 1e-4 * (world.rank + 1)
            replica.step()
        replica.finish()
        replica.detach()
        return model.vector.detach().numpy() - START[6:]

    for moved in ThreadWorld(size).run(worker):
        # Exact but for roundings in float64: an average with naive casts would not move at all.
        np.testing.assert_allclose(moved, 4.0 + steps * 2.5e-4, rtol=0, atol=1e-12)


def test_the_complete_graph_is_local_sgd_at_every_step() -> None:
    runs = [
        simulate(offbeat.algorithm(text), Quadratic, loss, steps=10, size=5, optimizer=sgd)
        for text in ("sgp('complete')", "local_sgd(every=1)")
    ]
    for ours, theirs in zip(*runs, strict=True):
        np.testing.assert_allclose(flat(ours[-1]), flat(theirs[-1]), rtol=0, atol=1e-13)


def test_a_mean_of_all_costs_an_all_reduce_and_16_bit_messages_half() -> None:
    def sent(algorithm: offbeat.Algorithm) -> int:
        def worker(world: World) -> int:
            replica = offbeat.replicate(Quadratic(), algorithm, mesh=world)
            for _ in range(2):  # the first also compares the ranks
                replica.step()
            replica.detach()
            return int(replica.stats()["last"]["bytes_sent"])

        (count,) = set(ThreadWorld(4).run(worker))
        return count

    assert sent(offbeat.sgp("complete")) == 2 * 3 * (DIMENSION * 8 + 16) // 4
    assert sent(offbeat.sgp(overlap=1, wire="bf16")) == DIMENSION * 2 + 16
    assert sent(offbeat.sgp("exponential", peers=2)) == 2 * (DIMENSION * 8 + 16)


@pytest.mark.fault(
    "a topology makes different graphs on different ranks",
    "ValueError on all ranks; names the ranks",
    group="Settings and arguments",
)
def test_a_graph_that_differs_between_ranks_is_refused_by_all() -> None:
    def worker(world: World) -> None:
        def other(size: int) -> networkx.Graph:
            return networkx.path_graph(size) if world.rank == 2 else networkx.cycle_graph(size)

        offbeat.replicate(Quadratic(), offbeat.sgp(other), mesh=world)

    with pytest.raises(ValueError, match=r"other graphs on the ranks \[2\] than on 0") as caught:
        ThreadWorld(4).run(worker)
    assert "ranks [0, 1, 2, 3] raised" in caught.value.__notes__[0]


def test_a_channels_last_model_and_one_with_gaps_follow_the_same_path() -> None:
    start = nn.Conv2d(3, 4, 3).double()  # one for all: threads share torch's generator

    def worker(world: World, kind: str) -> Array:
        model = copy.deepcopy(start)
        if kind == "channels last":
            model = model.to(memory_format=torch.channels_last)
        if kind == "gaps":
            wide = torch.zeros(4, 2, dtype=torch.float64)
            wide[:, 0] = model.bias.detach()
            model.bias = nn.Parameter(wide[:, 0])
        replica = offbeat.replicate(model, offbeat.sgp(Irregular(), overlap=1), mesh=world)
        with torch.no_grad():
            model.weight += world.rank
            model.bias *= world.rank
        for _ in range(5):
            replica.step()
        replica.detach()
        return np.concatenate([p.detach().contiguous().numpy().ravel() for p in model.parameters()])

    world = ThreadWorld(3)
    plain, last, gaps = (
        np.array(world.run(lambda world, kind=kind: worker(world, kind)))
        for kind in ("plain", "channels last", "gaps")
    )
    np.testing.assert_allclose(last, plain, rtol=0, atol=1e-14)
    np.testing.assert_allclose(gaps, plain, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"overlap": -1}, "overlap=-1"),
        ({"overlap": True}, "overlap=True"),
        ({"wire": "fp8"}, "wire='fp8'"),
        ({"biased": 1}, "biased=1"),
        ({"peers": 0}, "peers=0"),
        ({"topology": "ring", "peers": 2}, "peers=2 with topology='ring'"),
        ({"topology": "star"}, "expected one of 'exponential'"),
        ({"topology": [(3, "complete")]}, "the last with None"),
    ],
    ids=str,
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        offbeat.sgp(**settings)


def test_every_excludes_overlap() -> None:
    with pytest.raises(ValueError, match="every=2 with overlap=1"):
        offbeat.sgp(every=2, overlap=1)
