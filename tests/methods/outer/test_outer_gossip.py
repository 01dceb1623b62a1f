"""Outer steps in random pairs: who meets whom, what equals what, and that models stay together."""

import numpy as np
import pytest
import torch
from torch import nn

import offbeat
from offbeat.methods import OuterGossip
from offbeat.plan.record import record
from offbeat.testing import ThreadWorld, simulate
from offbeat.transport.world import World
from problems import Quadratic, flat, loss
from reference.noloco import pairs
from reference.participants import Array

COLLECTIVES = {"all_reduce", "all_gather", "reduce", "broadcast"}


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_ranks_draw_the_same_pairs_without_asking(size: int) -> None:
    settings = OuterGossip(every=3, seed=5)
    for index in range(20):
        expected = {rank: sum(p) - rank for p in pairs(size, 5, index) for rank in p if len(p) > 1}
        for rank in range(size):
            found = settings.partner(rank, size, step=3 * index + 2)
            assert found == expected.get(rank, rank)


def test_every_pair_meets() -> None:
    met = {(0, OuterGossip(every=1).partner(0, 5, step)) for step in range(50)}
    assert met == {(0, rank) for rank in range(5)}  # (0, 0): it is alone


@pytest.mark.parametrize("nodes", [[[rank] for rank in range(7)], [[0, 1], [2, 3], [4, 5]]])
def test_there_is_no_all_reduce(nodes: list[list[int]]) -> None:
    """One message each way, or none; between nodes of a slice, which the node then gathers."""
    within = {} if len(nodes) == 7 else {"within": "local"}
    model = {"w": torch.empty(1200, 1000, device="meta")}
    recorded = record(offbeat.noloco(every=2, **within), model, nodes, steps=100)
    between = {"node"} if within else {"world"}
    sent = []
    for step, events in enumerate(recorded.steps):
        assert not COLLECTIVES & {e.kind for e in events if e.axis in between}
        found = [e for e in events if e.kind in ("send", "receive")]
        assert len({e.peer for e in found}) <= 1
        assert step % 2 or not found
        sent.append(sum(e.nbytes for e in found if e.kind == "send"))
    share = len(nodes[0])
    assert set(sent) == {0, 1200 * 1000 * 4 // share}
    assert 0 < sent[1::2].count(0) < 30  # one in 7, or in 3, of the 50 exchanges


def test_two_ranks_are_diloco_without_nesterov() -> None:
    """They always meet: the slow weights are the same on both."""
    ours = run("noloco(every=2, lr=0.6, momentum=0.5, gossip_lr=0.3)", size=2)
    theirs = run("diloco(every=2, lr=0.6, momentum=0.5, nesterov=False)", size=2)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)


def test_models_that_do_not_train_keep_every_bit() -> None:
    def worker(world: World) -> None:
        model = nn.Linear(50, 40)
        replica = offbeat.replicate(model, offbeat.noloco(every=1, gossip_lr=0.33), mesh=world)
        before = model.weight.detach().clone()
        for _ in range(5):
            replica.step()
        assert torch.equal(model.weight, before)
        replica.detach()

    ThreadWorld(size=3).run(worker)


@pytest.mark.parametrize(("size", "momentum"), [(5, 0.5), (4, 0.9)])
def test_models_that_walk_at_random_stay_together(size: int, momentum: float) -> None:
    """Alone their variance grows with every step."""

    def worker(world: World, algorithm: offbeat.Algorithm) -> list[Array]:
        random = torch.Generator().manual_seed(world.rank)
        model = nn.Linear(30, 10, bias=False).double()
        replica = offbeat.replicate(model, algorithm, mesh=world)
        seen = []
        for _ in range(300):
            with torch.no_grad():
                model.weight += torch.randn(10, 30, generator=random, dtype=torch.float64)
            replica.step()
            seen.append(model.weight.detach().numpy().copy())
        replica.detach()
        return seen

    def variance(algorithm: offbeat.Algorithm) -> Array:
        found = ThreadWorld(size=size).run(lambda world: worker(world, algorithm))
        result: Array = np.array(found).var(axis=0).mean(axis=(1, 2))
        return result

    rate = (1 - momentum) * 0.7
    gossip = offbeat.noloco(every=2, lr=rate, momentum=momentum, gossip_lr=rate / 2)
    bounded, free = variance(gossip), variance(offbeat.alone())
    assert bounded[250:].mean() < 1.3 * bounded[100:150].mean() < 0.2 * free[250:].mean()
    assert free[250:].mean() > 1.5 * free[100:150].mean()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"gossip_lr": 0.0}, "gossip_lr=0 with momentum=0.5.*use 0 < gossip_lr < 1.5"),
        ({"lr": 1.5}, "gossip_lr=1.5 with momentum=0.5.*would not stay together"),
        ({"momentum": 0.9}, "gossip_lr=0.7 with momentum=0.9.*gossip_lr < 0.38, or a lower mom"),
        ({"momentum": 1.0}, "momentum=1.0, expected"),
        ({"seed": -1}, "seed=-1, expected"),
        ({"every": 0}, "every=0, expected"),
    ],
)
def test_settings_are_checked(settings: dict[str, float], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        offbeat.noloco(**settings)  # type: ignore[arg-type]


def test_a_model_that_is_loaded_late_needs_finish() -> None:
    def worker(world: World) -> None:
        model = Quadratic()
        replica = offbeat.replicate(model, offbeat.noloco(every=2), mesh=world)
        with torch.no_grad():
            model.vector += 1
        loss(model, world.rank, 0).backward()
        with pytest.raises(ValueError, match=r"written to after replicate.*call finish"):
            replica.step()

    ThreadWorld(size=2).run(worker)


def test_after_finish_a_run_goes_on_as_a_new_one() -> None:
    def worker(world: World, anew: bool) -> Array:
        model = Quadratic()
        replica = offbeat.replicate(model, offbeat.noloco(every=2), mesh=world)
        for step in range(8):
            if step == 4:
                replica.finish()
            if step == 4 and anew:
                replica.detach()
                replica = offbeat.replicate(model, offbeat.noloco(every=2), mesh=world)
            loss(model, world.rank, step).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.1 * parameter.grad
            model.zero_grad()
            replica.step()
        replica.detach()
        return flat(model.state_dict())

    world = ThreadWorld(size=2)
    expected = world.run(lambda world: worker(world, anew=True))
    np.testing.assert_array_equal(world.run(lambda world: worker(world, anew=False)), expected)


def run(text: str, size: int) -> Array:
    runs = simulate(offbeat.algorithm(text), Quadratic, loss, steps=9, size=size)
    return np.array([[flat(s) for s in run] for run in runs])
