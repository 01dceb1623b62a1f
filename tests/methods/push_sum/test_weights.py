"""Small weights of push-sum: shown, warned of, and an update that is scaled by them."""

import re

import networkx
import numpy as np
import pytest
import torch
from torch.optim import SGD

import offbeat
from offbeat.testing import ThreadWorld, simulate
from offbeat.topology import Digraph, Topology, mixing_matrix, smallest_weight
from offbeat.transport.world import World
from problems import START, Quadratic, flat, gradient, loss
from reference.participants import Array, Nodes
from reference.push_sum import one_peer_exponential, ring, sgp

LR, STEPS = 0.1, 20
UNEQUAL: Nodes = ((0, 1, 2), (3,), (4, 5))


def chain(size: int) -> networkx.DiGraph:
    """From each participant to the next one and back to the first: weights halve along it."""
    graph = networkx.DiGraph()
    graph.add_nodes_from(range(size))
    graph.add_edges_from((i, i + 1) for i in range(size - 1))
    graph.add_edges_from((i, 0) for i in range(1, size))
    return graph


CHAIN = Digraph(chain)


def of_chain(size: int, index: int) -> Array:
    return mixing_matrix(CHAIN, size, index)


@pytest.mark.parametrize("overlap", [0, 1, 3])
@pytest.mark.parametrize("nodes", [None, UNEQUAL], ids=["ranks", "nodes"])
def test_weighted_updates_follow_the_reference(overlap: int, nodes: Nodes | None) -> None:
    layout = nodes or ((0,), (1,), (2,), (3,))
    recipe = offbeat.sgp(
        CHAIN, overlap=overlap, weighted_updates=True, within="local" if nodes else None
    )
    runs = simulate(
        recipe,
        Quadratic,
        loss,
        steps=STEPS,
        nodes=layout,
        optimizer=lambda parameters: SGD(parameters, lr=LR, momentum=0.9),
    )
    ours = np.array([[flat(state) for state in states] for states in runs]).swapaxes(0, 1)
    theirs, weights = sgp(
        START,
        gradient,
        matrix=of_chain,
        nodes=layout,
        steps=STEPS,
        lr=LR,
        momentum=0.9,
        within_local=nodes is not None,
        overlap=overlap,
        weighted=True,
    )
    assert weights.min() < 0.8
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("overlap", [0, 2])
def test_a_step_moves_the_model_by_its_update_or_by_more(weighted: bool, overlap: int) -> None:
    """In a step without an exchange the model shows it; in one with, what was sent does."""

    def worker(world: World) -> tuple[float, Array]:
        model = Quadratic()
        algorithm = offbeat.sgp(CHAIN, overlap=overlap, weighted_updates=weighted)
        replica = offbeat.replicate(model, algorithm, mesh=world)
        for _ in range(9):  # with overlap the last one sends
            replica.step()
        weight = replica.stats()["measures"]["weight"]
        if world.rank == 2:
            with torch.no_grad():
                model.vector += 1.0
        replica.step()
        alone = model.vector.detach().numpy() - START[6:]
        replica.finish()
        replica.detach()
        total = model.vector.detach().numpy() - START[6:]
        return weight, np.stack([alone, total])

    runs = ThreadWorld(3).run(worker)
    weight, (alone, total) = runs[2]
    assert weight < 0.8
    factor = weight if weighted else 1.0
    np.testing.assert_allclose(total, factor / 3, rtol=0, atol=1e-14)
    if overlap:
        np.testing.assert_allclose(alone, factor / weight, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("topology", "matrix"), [(CHAIN, of_chain), (offbeat.Ring(), ring)])
@pytest.mark.parametrize("overlap", [0, 1, 3])
def test_the_smallest_weight_is_that_of_a_run(
    topology: Topology, matrix: object, overlap: int
) -> None:
    size = 7
    _, weights = sgp(
        START,
        lambda rank, z, step: 0 * z,
        matrix=matrix,  # type: ignore[arg-type]
        nodes=tuple((rank,) for rank in range(size)),
        steps=10 * size * max(1, overlap),
        lr=LR,
        overlap=overlap,
    )
    assert smallest_weight(topology, size, overlap) == pytest.approx(weights.min(), rel=1e-12)


def test_the_smallest_weight_of_many_graphs() -> None:
    phases = offbeat.sgp([(3, "complete"), (None, CHAIN)]).parameters.topology  # type: ignore[union-attr]
    assert smallest_weight(phases, 7) == smallest_weight(CHAIN, 7)
    lone = tuple((rank,) for rank in range(6))
    _, weights = sgp(
        START,
        lambda rank, z, step: 0 * z,
        matrix=one_peer_exponential,
        nodes=lone,
        steps=60,
        lr=LR,
        overlap=1,
    )
    assert smallest_weight(offbeat.Exponential(), 6, overlap=1) == pytest.approx(weights.min())


def attach(algorithm: offbeat.Algorithm, size: int) -> None:
    def worker(world: World) -> None:
        offbeat.replicate(Quadratic(), algorithm, mesh=world).detach()

    ThreadWorld(size).run(worker)


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.fault(
    "a graph of sgp leaves a participant a weight below 0.2",
    "a warning with the factor 1/w of its steps",
    group="Models and algorithms",
)
def test_small_weights_are_warned_of_once(overlap: int) -> None:
    with pytest.warns(RuntimeWarning, match="weights come down to") as heard:
        attach(offbeat.sgp(CHAIN, overlap=overlap), size=8)
    (warning,) = heard
    assert warning.filename == __file__, "the warning names the line of the user"
    weight, factor = re.findall(r"down to (\S+), .* 1/w = (\S+) times", str(warning.message))[0]
    assert float(weight) == pytest.approx(smallest_weight(CHAIN, 8, overlap), rel=0.05)
    assert float(factor) == pytest.approx(1 / smallest_weight(CHAIN, 8, overlap), rel=0.01)


@pytest.mark.parametrize(
    "algorithm",
    [
        offbeat.sgp("ring"),
        offbeat.sgp(overlap=1),
        offbeat.sgp(CHAIN, weighted_updates=True),
        offbeat.sgp(CHAIN, biased=True),
    ],
    ids=["ring", "overlap", "weighted", "biased"],
)
def test_other_weights_are_not(algorithm: offbeat.Algorithm) -> None:
    attach(algorithm, size=8)  # a warning would be an error


def test_weights_can_scale_only_what_has_them() -> None:
    with pytest.raises(ValueError, match="weighted_updates=True with biased=True"):
        offbeat.sgp(biased=True, weighted_updates=True)
