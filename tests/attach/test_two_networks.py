"""Two networks trained in turns, as in a GAN: frozen for the moment, one replica or two."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import offbeat
from offbeat.testing import ThreadWorld
from offbeat.transport.world import World

NODES = ((0, 1), (2, 3))
RECIPES = [
    "ddp",
    "ddp(wire='bf16')",
    "lags(density=0.3)",
    "slgs(density=0.3)",
    "adasum",
    "sgp",
    "daso(every=2, total_steps=6)",
]


def networks() -> tuple[nn.Sequential, nn.Sequential]:
    """Return a discriminator and a generator, the same on all ranks."""
    made = torch.Generator().manual_seed(0)
    pair = (
        nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)),
        nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)),
    )
    with torch.no_grad():
        for network in pair:
            for parameter in network.double().parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=made) * 0.4)
    return pair


def train(world: World, text: str, way: str) -> list[Tensor]:
    """Train by turns, frozen as ``toggle_optimizer`` of Lightning and pix2pix do, or not."""
    d, g = networks()
    algorithm = offbeat.algorithm(text)
    together = [nn.ModuleList([d, g])] if way == "one replica" else [d, g]
    replicas = [offbeat.replicate(network, algorithm, mesh=world) for network in together]
    optimizers = [SGD(network.parameters(), lr=0.1, momentum=0.5) for network in (d, g)]
    draw = torch.Generator().manual_seed(1 + world.rank)

    def turn(number: int, losses: Sequence[Tensor]) -> None:
        sum(losses[1:], losses[0]).backward()
        optimizers[number].step()
        optimizers[number].zero_grad()
        if way != "one replica":
            replicas[number].step()

    for _ in range(6):
        real, noise = (torch.randn(8, n, generator=draw, dtype=torch.float64) for n in (4, 3))
        d.requires_grad_(True)
        g.requires_grad_(False)
        turn(0, [d(real).square().mean(), (d(g(noise)) - 1).square().mean()])
        g.requires_grad_(True)
        d.requires_grad_(False)
        turn(1, [d(g(noise)).square().mean()])
        if way == "one replica":
            replicas[0].step()
    d.requires_grad_(True)
    for replica in replicas:
        replica.finish()
        replica.detach()
    return [p.detach().clone() for network in (d, g) for p in network.parameters()]


@pytest.mark.parametrize("text", ["ddp", "lags(density=0.3)"])
@pytest.mark.fault(
    "parameters are frozen and unfrozen inside a step (GAN, toggle_optimizer)",
    "they count as unused",
)
def test_one_replica_or_two(text: str) -> None:
    one = ThreadWorld(nodes=NODES).run(lambda world: train(world, text, "one replica"))
    two = ThreadWorld(nodes=NODES).run(lambda world: train(world, text, "two replicas"))
    for ours, theirs in zip(one, two, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-14)


@pytest.mark.parametrize("text", RECIPES)
def test_networks_frozen_in_turns(text: str) -> None:
    first, *others = ThreadWorld(nodes=NODES).run(lambda world: train(world, text, "one replica"))
    for other in others:
        assert all(map(torch.equal, first, other))
    start = [parameter for network in networks() for parameter in network.parameters()]
    for before, after in zip(start, first, strict=True):
        assert after.isfinite().all()
        assert not torch.equal(before, after)


def test_a_parameter_frozen_on_one_rank_counts_as_zero_there() -> None:
    def work(world: World) -> float:
        model = nn.Linear(1, 1)
        replica = offbeat.replicate(model, offbeat.ddp(), mesh=world)
        for step in range(2):
            model.weight.requires_grad_((step, world.rank) != (1, 1))
            model(torch.full((1,), 2.0)).sum().backward()
            replica.step()
            grad = float(model.weight.grad)
            model.zero_grad()
        return grad

    assert ThreadWorld(2).run(work) == [1.0, 1.0]


@pytest.mark.parametrize("recipe", ["ddp", "lags(density=1.0)"])
def test_a_stale_gradient_of_a_frozen_parameter_is_left_alone(recipe: str) -> None:
    def work(world: World) -> list[float]:
        model = nn.Linear(1, 1)
        replica = offbeat.replicate(model, offbeat.algorithm(recipe), mesh=world)
        seen = []
        for frozen in (False, False, True, True):  # first in memory whose order is assumed
            model.weight.requires_grad_(not frozen)
            model(torch.full((1,), 2.0 + world.rank)).sum().backward()
            seen.append(float(model.weight.grad))
            replica.step()
        return seen

    assert ThreadWorld(2).run(work) == [[2.5, 5.0, 5.0, 5.0]] * 2
