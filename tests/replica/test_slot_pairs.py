"""The two slots combine freely: sparse gradients inside nodes, anything between them.

Pairs with mean gradients inside are recipes, and the contract tests them.
"""

import io
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import SGD, Adam

import offbeat
from offbeat.methods import (
    AdasumUpdate,
    Average,
    Cycle,
    OuterStep,
    PairAverage,
    PushSum,
    SlowMomentum,
    StaleAverage,
    TopK,
)
from offbeat.testing import ThreadWorld, simulate, snapshot
from offbeat.transport.world import World
from problems import START, Quadratic, flat, gradient, loss
from reference.daso import daso
from reference.lags import sent_of, top_k
from reference.participants import Array, Nodes

LR = 0.1
NODES: Nodes = ((0, 1), (2, 3), (4,))
sparse = TopK(density=0.2, selection="exact", units="gradient", over="local")
PARAMETERS = (
    Average(every=3, over="node"),
    OuterStep(every=3, delay=2, fragments=2, over="node"),
    AdasumUpdate(every=2, over="node"),
    PushSum(overlap=1, over="node"),
    SlowMomentum(gossip=PushSum(overlap=1, over="node"), every=3),
    StaleAverage(cycle=Cycle(every=3, wait=2, warmup_steps=2)),
    PairAverage(over="node"),  # the last: the clock decides who meets whom
)
PAIRS = [offbeat.Algorithm(sparse, between) for between in PARAMETERS]


def named(pairs: list[offbeat.Algorithm]) -> Any:
    ids = [type(pair.parameters).__name__ for pair in pairs]
    return pytest.mark.parametrize("pair", pairs, ids=ids)


def train(model: Quadratic, replica: offbeat.Replica, optimizer: Any, steps: int) -> None:
    for step in range(steps):
        loss(model, replica.world.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        replica.step()


@named(PAIRS)
def test_nodes_hold_one_model_and_all_are_equal_in_the_end(pair: offbeat.Algorithm) -> None:
    def worker(world: World) -> tuple[Array, Array]:
        model = Quadratic()
        replica = offbeat.replicate(model, pair, mesh=world)
        train(model, replica, SGD(model.parameters(), lr=LR, momentum=0.9), 7)
        own = flat(snapshot(model))
        replica.finish()
        replica.detach()
        return own, flat(snapshot(model))

    runs = ThreadWorld(nodes=NODES).run(worker)
    for own, last in runs:
        assert np.isfinite(own).all()
        assert np.array_equal(last, runs[0][1])
    for node in NODES:
        assert all(np.array_equal(runs[rank][0], runs[node[0]][0]) for rank in node)
    assert not np.array_equal(runs[0][0], START)


@named(PAIRS[:-1])
def test_pairs_resume_bit_equal(pair: offbeat.Algorithm) -> None:
    def worker(world: World) -> None:
        model = Quadratic(torch.float32)
        replica = offbeat.replicate(model, pair, mesh=world)
        optimizer = Adam(model.parameters(), lr=LR)
        train(model, replica, optimizer, 4)
        file = io.BytesIO()
        torch.save([replica.state_dict(), optimizer.state_dict()], file)
        train(model, replica, optimizer, 5)
        file.seek(0)
        saved, momenta = torch.load(file, weights_only=True)
        again = Quadratic(torch.float32)
        resumed = offbeat.replicate(again, pair, mesh=world)
        resumed.load_state_dict(saved)
        optimizer = Adam(again.parameters(), lr=LR)
        optimizer.load_state_dict(momenta)
        train(again, resumed, optimizer, 5)
        for (name, ours), theirs in zip(again.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(ours, theirs), name
        for left in (replica, resumed):
            left.detach()

    ThreadWorld(nodes=NODES).run(worker)


def test_sparse_gradients_inside_and_stale_sums_between_follow_the_reference() -> None:
    """Error feedback rank by rank in each node, layers of 6 and 3; nodes of 2, 2 and 1."""
    residual = np.zeros((5, 9))

    def sparsified(z: Array, k: int) -> Array:
        acc = residual + np.stack([gradient(r, z[r // 2], k) for r in range(5)])
        sent = acc.copy()
        for node in NODES[:2]:
            for rank in node:
                for layer in (slice(0, 6), slice(6, 9)):
                    d = layer.stop - layer.start
                    sent[rank, layer] = top_k(acc[rank, layer], sent_of(d, 0.2, len(node)))
        residual[:] = acc - sent  # alone in its node, a rank exchanges nothing and keeps nothing
        return np.stack([sent[list(node)].mean(axis=0) for node in NODES])

    pair = offbeat.Algorithm(sparse, StaleAverage(cycle=Cycle(every=3, wait=2)))
    runs = simulate(pair, Quadratic, loss, steps=20, nodes=NODES, optimizer=lambda p: SGD(p, lr=LR))
    ours = np.array([[flat(s) for s in run] for run in runs]).swapaxes(0, 1)
    theirs = daso(START, gradient, nodes=NODES, steps=20, lr=LR, every=3, wait=2, inside=sparsified)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)
