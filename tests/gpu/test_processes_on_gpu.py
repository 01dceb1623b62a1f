"""Processes that share one GPU; Gloo carries their messages through the host, or NCCL.

NCCL takes one rank for each GPU of a host, so every rank of these tests says it is another host.
"""

import os
import signal
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

import offbeat
import problems
from offbeat.testing import snapshot
from problems import START, Quadratic, flat, gradient
from ranks import Spawned
from recipe_cases import CASES, Case

pytestmark = pytest.mark.processes

LR, STEPS, DEVICE = 0.1, 18, "cuda"
TEXTS = ["ddp", "lags(density=0.2)", "adasum", "sgp(overlap=1)", "diloco(every=3)"]
every_kind = pytest.mark.parametrize(
    "case", [case for case in CASES if case.text in TEXTS], ids=lambda case: case.text
)


@every_kind
@pytest.mark.parametrize(("size", "backend"), [(2, "gloo"), (4, "gloo"), (3, "nccl")])
def test_follows_the_reference_and_keeps_its_peak_of_memory(
    case: Case, size: int, backend: str
) -> None:
    found = Spawned(_train, size, case.text, backend=backend).join(timeout=100)
    assert len(found) == size
    assert case.reference is not None
    nodes = tuple((rank,) for rank in range(size))
    theirs = case.reference(START, gradient, nodes=nodes, steps=STEPS, lr=LR, momentum=0.9)
    for rank, course, peaks in found:
        np.testing.assert_allclose(course, theirs[:, rank], rtol=0, atol=case.tolerance)
        assert peaks[-1] == peaks[STEPS // 2], "buffers are allocated anew in every step"


def _train(rank: int, results: Any, text: str) -> None:
    problems.DEVICE = DEVICE
    model = Quadratic()
    replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=_alone())
    optimizer = SGD(model.parameters(), lr=LR, momentum=0.9)
    course, peaks = [flat(snapshot(model))], []
    for _ in range(STEPS):
        model(rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        replica.step()
        course.append(flat(snapshot(model)))
        peaks.append(torch.cuda.max_memory_allocated())
    replica.detach()
    results.put((rank, np.array(course), peaks))


@pytest.mark.parametrize("how", ["compiled", "graphed"])
def test_compiled_and_captured_models_train_as_others(how: str) -> None:
    plain, found = (
        sorted(Spawned(_train_network, 2, way).join(timeout=110)) for way in ("plain", how)
    )
    assert len(found) == 2
    np.testing.assert_allclose(found, plain, rtol=1e-4, atol=1e-5)


def _train_network(rank: int, results: Any, how: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(DEVICE)
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank)).to(DEVICE)
    run: Any = model
    if how == "graphed":  # forward and backward are replayed; gradients are accumulated after
        run = torch.cuda.make_graphed_callables(model, (inputs,))
    elif how == "compiled":
        run = torch.compile(model)
    replica = offbeat.replicate(model, offbeat.ddp(), mesh=_alone())
    optimizer = SGD(model.parameters(), lr=LR)
    for _ in range(5):
        run(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        replica.step()
    replica.detach()
    results.put([rank, *(float(p.sum()) for p in model.parameters())])


def test_one_replica_follows_another_over_nccl() -> None:
    assert len(Spawned(_attach_again, 2, backend="nccl").join(timeout=100)) == 2


def _attach_again(rank: int, results: Any) -> None:
    problems.DEVICE = DEVICE
    for _ in range(4):
        model = Quadratic()
        replica = offbeat.replicate(model, offbeat.ddp(), mesh=_alone())
        for _ in range(5):
            model(rank).backward()
            replica.step()
        replica.detach()
    results.put(rank)


@pytest.mark.parametrize("text", ["ddp", "lags(density=0.34)", "local_sgd(every=2)"])
def test_survivors_train_on_over_nccl(text: str) -> None:
    found = Spawned(_lose_one, 3, text, backend="nccl").join(timeout=100)
    assert sorted(rank for rank, *_ in found) == [0, 2]
    (_, model, lost), (_, other, _) = found
    np.testing.assert_array_equal(model, other)
    assert [loss["rank"] for loss in lost] == [1]


def _lose_one(rank: int, results: Any, text: str) -> None:
    problems.DEVICE = DEVICE
    model = Quadratic()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.5)
    replica = offbeat.replicate(
        model, offbeat.algorithm(text), mesh=_alone(), optimizer=optimizer, elastic=True
    )
    for step in range(40):
        model(rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        if (rank, step) == (1, 20):
            os.kill(os.getpid(), signal.SIGKILL)
        replica.step()
    replica.finish()
    results.put((rank, flat(snapshot(model)), replica.lost))
    replica.detach()


def test_batches_are_normalized_over_the_node() -> None:
    found = dict(Spawned(_normalize, 2).join(timeout=60))
    whole = nn.BatchNorm1d(3)(torch.cat([_batch(0), _batch(1)])).detach().numpy()
    np.testing.assert_allclose(np.concatenate([found[0], found[1]]), whole, atol=1e-5)


def _normalize(rank: int, results: Any) -> None:
    layer = offbeat.sync_batch_norm(nn.Sequential(nn.BatchNorm1d(3)).to(DEVICE))
    results.put((rank, layer(_batch(rank).to(DEVICE)).detach().cpu().numpy()))


def _batch(rank: int) -> torch.Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(rank)) + rank


def _alone() -> Any:
    """Every process is a node of its own."""
    return offbeat.World.of([[rank] for rank in range(dist.get_world_size())])
