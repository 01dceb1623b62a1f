"""Virtual workers: equal to thread worlds, at a thousand workers too, and what they refuse."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

import offbeat
from offbeat.functional import tree
from offbeat.testing import simulate
from offbeat.testing.virtual import VirtualWorkers
from offbeat.testing.virtual.adasum import tree as tree_of_levels
from problems import CURVATURES, OPTIMA, RANKS, Quadratic, loss
from reference.participants import Nodes

UNEQUAL: Nodes = ((0, 1), (2, 3, 4), (5, 6, 7))
EACH: Nodes = tuple((rank,) for rank in range(RANKS))
DATA = torch.tensor(CURVATURES), torch.tensor(OPTIMA)


class Same(nn.Module):
    """The quadratic problem with data as arguments: vmap cannot look them up by rank."""

    def __init__(self) -> None:
        super().__init__()
        model = Quadratic()
        self.matrix, self.vector, self.frozen = model.matrix, model.vector, model.frozen

    def forward(self, curvature: Tensor, optimum: Tensor) -> Tensor:
        x = torch.cat([self.matrix.reshape(-1), self.vector])
        return 0.5 * (curvature * (x - optimum) ** 2).sum()


def of_one(model: Same, curvature: Tensor, optimum: Tensor) -> Tensor:
    result: Tensor = model(curvature, optimum)
    return result


@pytest.mark.parametrize(
    ("text", "nodes", "optimizer"),
    [
        ("ddp", EACH, "SGD"),
        ("alone", EACH, "Adam"),
        ("lags(density=0.2)", EACH, "SGD"),
        ("lags(density=0.5)", EACH, "Adam"),  # sent whole: no cheaper sparse
        ("slgs(density=0.3)", EACH, "Adam"),
        ("local_sgd(every=3)", EACH, "SGD"),
        ("local_sgd(every=3, within='local')", UNEQUAL, "Adam"),
        ("sgp", EACH, "SGD"),
        ("sgp('complete')", EACH, "SGD"),
        ("sgp(overlap=2, weighted_updates=True)", EACH, "Adam"),
        ("sgp(overlap=1, within='local')", UNEQUAL, "SGD"),
        ("d_psgd('bipartite')", EACH, "Adam"),
        ("adasum", EACH, "SGD"),
        ("adasum(every=2, within='local')", UNEQUAL, "Adam"),
        ("daso(every=4, wait=2, wire=None)", UNEQUAL, "Adam"),
        ("daso(every=3, wait=2, merge='exact')", UNEQUAL, "SGD"),
        (
            "daso(every=4, wait=2, total_steps=1000, warmup_steps=3, cooldown_steps=990)",
            UNEQUAL,
            "Adam",
        ),
    ],
)
def test_virtual_workers_equal_a_thread_world(text: str, nodes: Nodes, optimizer: str) -> None:
    def build(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        if optimizer == "Adam":
            return Adam(parameters, lr=0.05)
        return SGD(parameters, lr=0.1, momentum=0.9)

    algorithm = offbeat.algorithm(text)
    runs = simulate(algorithm, Quadratic, loss, steps=12, nodes=nodes, optimizer=build)
    workers = VirtualWorkers(algorithm, Same(), nodes=nodes, optimizer=build)
    for step in range(12):
        workers.step(of_one, *DATA)
        for name, rows in workers.parameters().items():
            expected = torch.stack([run[step + 1][name] for run in runs])
            np.testing.assert_allclose(rows, expected, rtol=0, atol=1e-10)


def test_losses_and_distances_are_those_of_the_rows() -> None:
    workers = VirtualWorkers(offbeat.alone(), Same(), size=RANKS)
    losses = workers.step(of_one, *DATA)
    expected = [loss(Quadratic(), rank, 0).item() for rank in range(RANKS)]
    np.testing.assert_allclose(losses, expected, rtol=1e-14)
    rows = workers.rows.detach()
    apart = rows - rows.mean(0)
    lengths = apart.norm(dim=1)
    expected = [lengths.mean().item(), lengths.max().item()]
    np.testing.assert_allclose(workers.distance(), expected, rtol=1e-12)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 6, 7, 8, 13, 64])
def test_the_tree_of_levels_is_the_tree(size: int) -> None:
    rows = torch.randn(size, 30, dtype=torch.float64)
    torch.testing.assert_close(tree_of_levels(rows), tree(rows), rtol=0, atol=1e-12)


def test_a_thousand_workers_of_gossip_agree() -> None:
    """log2 n exchanges of the one-peer exponential graph average exactly."""
    workers = VirtualWorkers(offbeat.sgp(), nn.Linear(3, 1, bias=False).double(), size=1024)
    with torch.no_grad():
        workers.rows.copy_(torch.randn(1024, 3))
    mean = workers.rows.detach().mean(0)
    for _ in range(10):
        workers.step(lambda model, x: 0 * model(x).sum(), torch.zeros(1024, 3).double())
    torch.testing.assert_close(workers.rows.detach(), mean.expand(1024, 3), rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ({}, "give either size, 1 or more, or nodes"),
        ({"size": 3, "nodes": [[0, 1], [2]]}, "give either size"),
        ({"nodes": [[0, 1], [3]]}, r"nodes=\[\[0, 1\], \[3\]\] for 3 workers; use each"),
    ],
)
def test_layouts_are_checked(layout: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        VirtualWorkers(offbeat.sgp(), Same(), **layout)


def test_models_are_checked() -> None:
    with pytest.raises(ValueError, match=r"of the dtypes .*, expected one; use model.float\(\)"):
        VirtualWorkers(
            offbeat.sgp(), nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1).double()), size=2
        )


@pytest.mark.parametrize("text", ["sgp", "lags(density=0.2)", "slgs(density=0.2)", "daso(every=2)"])
def test_one_worker_trains_alone(text: str) -> None:
    workers, alone = (
        VirtualWorkers(offbeat.algorithm(each), Same(), size=1) for each in (text, "alone")
    )
    for each in (workers, alone):
        for _ in range(4):
            each.step(of_one, *(data[:1] for data in DATA))
    assert torch.equal(workers.rows, alone.rows)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ad_psgd", "PairAverage.*: virtual workers know Average, PushSum.*testing.simulate"),
        ("diloco", "OuterStep.*: virtual workers know"),
        ("ddp('bf16')", "Mean\\(wire='bf16'\\): virtual workers know wire=None only"),
        ("sgp(wire='bf16')", "PushSum\\(wire='bf16'\\)"),
        ("lags('adaptive')", "densities that are no measurements"),
        ("alone for 2 steps, then local_sgd", "changes its exchanges, which is not simulated"),
        ("auto", "changes its exchanges"),
        ("lags(momentum=0.5)", "TopK\\(momentum=0.5\\)"),
    ],
)
def test_what_is_not_simulated_is_refused(text: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        VirtualWorkers(offbeat.algorithm(text), Same(), size=4)
