"""A density of its own for each layer: by name, by pattern, by a function."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD

import offbeat
from offbeat.methods import TopK
from offbeat.methods.top_k.density import layer_densities
from offbeat.testing import ThreadWorld, snapshot
from offbeat.transport.world import World
from problems import START, Quadratic, flat, gradient, loss
from reference.lags import lags

SIZES = {"body.0.weight": 100, "body.0.bias": 10, "head.weight": 50}


@pytest.mark.parametrize(
    ("density", "expected"),
    [
        (0.5, [0.5, 0.5, 0.5]),
        ({"*": 0.1}, [0.1, 0.1, 0.1]),
        # A name comes before all patterns, an earlier pattern before a later one.
        ({"*.weight": 0.1, "body.*": 0.2, "head.weight": 1}, [0.1, 0.2, 1.0]),
        ({"body.*": 0.2, "*.weight": 0.1}, [0.2, 0.2, 0.1]),
        ({"body.[0-9].bias": 1.0, "*": 0.3}, [0.3, 1.0, 0.3]),
        (lambda name, numel: 1 / numel if name[0] == "b" else 0.5, [0.01, 0.1, 0.5]),
    ],
)
def test_each_layer_has_its_density(density: Any, expected: list[float]) -> None:
    found = layer_densities(density, SIZES)
    assert list(found) == list(SIZES)
    assert list(found.values()) == expected


@pytest.mark.parametrize(
    ("density", "said"),
    [
        (
            {"body.*": 0.1, "haed.*": 0.2, "*": 0.3},
            r"'haed.\*' matches no parameter.*'body.0.weight'",
        ),
        ({"body.*": 0.1}, r"matches parameter 'head.weight'; add a last pattern '\*'"),
        (
            lambda name, numel: 0.0,
            r"returned 0.0 for 'body.0.weight', expected a number in \(0, 1\]",
        ),
        (lambda name, numel: None, "returned None"),
        (lambda name, numel: float("nan"), "returned nan"),
    ],
)
def test_what_fits_no_layer_is_refused(density: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        layer_densities(density, SIZES)


@pytest.mark.parametrize(
    "density", [{}, {"*": 0.0}, {"*": 1.5}, {"*": "a"}, {"*": True}, {3: 0.1}, {"*": float("nan")}]
)
def test_mappings_that_mean_nothing_are_refused_at_once(density: Any) -> None:
    with pytest.raises(ValueError, match=r"expected a number in \(0, 1\] for each name"):
        TopK(density=density)


def test_the_model_as_a_whole_has_one_density() -> None:
    with pytest.raises(ValueError, match="give a number, or leave scope='layer'"):
        TopK(density={"*": 0.1}, scope="model")


def test_a_mapping_has_a_text_that_makes_it_again() -> None:
    pair = offbeat.algorithm("lags({'head.*': 0.01, '*': 0.001}, warmup=4)")
    assert offbeat.algorithm(repr(pair)) == pair


def by_size(name: str, numel: int) -> float:
    return 0.4 if numel == 6 else 0.35


@pytest.mark.parametrize("density", [{"matrix": 0.4, "*": 0.35}, by_size], ids=["mapping", "call"])
def test_follows_the_reference(density: Any) -> None:
    """Layers of 6 and 3: two entries of the first are sent and one of the second."""

    def worker(world: World) -> list[Any]:
        model = Quadratic()
        optimizer = SGD(model.parameters(), lr=0.1)
        replica = offbeat.replicate(model, offbeat.lags(density), mesh=world, optimizer=optimizer)
        history = [flat(snapshot(model))]
        for step in range(12):
            loss(model, world.rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
            history.append(flat(snapshot(model)))
        assert replica.stats()["lags"]["c"] == {"matrix": 3.0, "vector": 3.0}
        replica.detach()
        return history

    found = np.array(ThreadWorld(2).run(worker)).swapaxes(0, 1)
    expected, _ = lags(
        START,
        gradient,
        nodes=((0,), (1,)),
        steps=12,
        lr=0.1,
        layers=(6, 3),
        density=(0.4, 0.35),
        lr_units=True,
    )
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def test_a_warm_up_ends_at_the_density_of_each_layer() -> None:
    def worker(world: World) -> list[dict[str, float]]:
        model = nn.ModuleDict({"a": nn.Linear(100, 10, bias=False), "b": nn.Linear(10, 100)})
        algorithm = offbeat.lags({"a.*": 0.1, "b.weight": 0.01, "b.bias": 1.0}, warmup=4)
        replica = offbeat.replicate(model, algorithm, mesh=world)
        found = []
        for _ in range(6):
            model["b"](model["a"](torch.randn(2, 100))).sum().backward()
            model.zero_grad()
            replica.step()
            found.append(dict(replica.stats()["lags"]["c"]))
        replica.detach()
        return found

    for found in ThreadWorld(2).run(worker):
        assert found[0] == {"a.weight": 4.0, "b.weight": 4.0, "b.bias": 1.0}
        assert found[-1] == {"a.weight": 10.0, "b.weight": 100.0, "b.bias": 1.0}


@pytest.mark.fault(
    "lags(density={...}) has a pattern, or the model a parameter, without a match",
    "ValueError on all ranks",
    group="Settings and arguments",
)
@pytest.mark.parametrize("density", [{"matrx": 0.1, "*": 0.1}, {"matrix": 0.1}])
def test_patterns_that_do_not_fit_are_an_error_on_all_ranks(density: Any) -> None:
    def worker(world: World) -> str:
        with pytest.raises(ValueError, match="rank 0: density: ") as raised:
            offbeat.replicate(Quadratic(), offbeat.lags(density), mesh=world)
        return str(raised.value)

    assert len(set(ThreadWorld(2).run(worker))) == 1


class OfRank:
    """A function that prints alike on all ranks, and differs."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __call__(self, name: str, numel: int) -> float:
        return 0.1 * (1 + self.rank)


@pytest.mark.fault(
    "ranks differ in a density by layer under lags",
    "ValueError on all ranks; with both values",
    group="Settings and arguments",
)
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (OfRank, "the algorithm's density of .* is 0.1 here and 0.2 there"),
        (lambda rank: {"matrix": 0.1 * (1 + rank), "*": 0.1}, "'matrix': 0.2.* there"),
    ],
    ids=["function", "mapping"],
)
def test_densities_that_differ_between_ranks_are_an_error_on_all(make: Any, said: str) -> None:
    def worker(world: World) -> str:
        with pytest.raises(ValueError, match=said) as raised:
            offbeat.replicate(Quadratic(), offbeat.lags(make(world.rank)), mesh=world)
        return str(raised.value)

    assert len(set(ThreadWorld(2).run(worker))) == 1
