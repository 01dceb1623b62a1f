"""Gradients that the script keeps after it has cleared ``.grad``: PCGrad, surgery, logs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from test_compressed import INT8
from torch import Tensor, nn

import offbeat
from offbeat.testing import ThreadWorld
from offbeat.transport.world import World

ALGORITHMS = {
    "ddp": offbeat.ddp(),
    "ddp, 16 bits": offbeat.ddp(wire="bf16"),
    "lags": offbeat.lags(0.1),
    "lags with momentum": offbeat.lags(0.1, momentum=0.9),
    "lags, dense": offbeat.lags(1.0),
    "slgs": offbeat.slgs(0.1),
    "daso": offbeat.daso(every=2, total_steps=40),
    "a partition": offbeat.adasum(partition=True),
    "a compressor": INT8,
}
WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda grad: grad,
    "a slice": lambda grad: grad.view(-1)[1:],
    "detached": lambda grad: grad.detach(),
    "as an array": lambda grad: torch.from_numpy(grad.numpy()),
}


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def backward(model: nn.Module, factor: float) -> None:
    (factor * model(torch.linspace(-1, 1, 8))).square().sum().backward()


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(
            name,
            way,
            marks=pytest.mark.fault(
                "a script keeps gradients over a backward (PCGrad)",
                "they keep their values",
            )
            if name == "ddp"
            else (),
        )
        for name in ALGORITHMS
        for way in WAYS
        if way == "itself" or name in ("ddp", "lags", "a compressor")
    ],
)
def test_a_kept_gradient_keeps_its_values(name: str, way: str) -> None:
    """In the same step and in later ones; only one is kept at a time, of one parameter or all."""

    def worker(world: World) -> None:
        model = network()
        replica = offbeat.replicate(model, ALGORITHMS[name], mesh=world)
        kept: list[tuple[Tensor, Tensor]] = []
        for step in range(4):
            for part in range(2):
                backward(model, 1.0 + step + 0.5 * part)
                grads = [p.grad for p in model.parameters() if p.grad is not None]
                shown = [WAYS[way](grad) for grad in grads[: 1 if step == 1 else None]]
                kept += [(grad, grad.clone()) for grad in shown]
                del grads, shown
                model.zero_grad()
            replica.step()
            assert all(torch.equal(grad, copy) for grad, copy in kept)
            if step == 1:
                kept.clear()
        replica.detach()
        assert len(kept) >= 4
        assert any(copy.any() for _, copy in kept)

    nodes = ((0, 1), (2, 3)) if name in ("daso", "a partition") else ((0,), (1,))
    ThreadWorld(nodes=nodes).run(worker)


@pytest.mark.parametrize(
    ("set_to_none", "name"),
    [*((False, name) for name in ALGORITHMS if "16" not in name), (True, "ddp"), (True, "lags")],
)
def test_nothing_is_allocated_for_gradients_that_nobody_keeps(set_to_none: bool, name: str) -> None:
    """Gradients that stay in .grad are changed in place: without offbeat, too."""

    def worker(world: World) -> list[set[int]]:
        model = network()
        replica = offbeat.replicate(model, ALGORITHMS[name], mesh=world)
        places: list[set[int]] = []
        held: list[Any] = []
        for step in range(6):
            backward(model, 1.0 + step)
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            if step > 1:  # the memory of the first is laid out in another order
                places.append({grad.data_ptr() for grad in grads})
            if not set_to_none and step == 2:
                held += grads
            model.zero_grad(set_to_none=set_to_none)
            del grads
            replica.step()
        if not set_to_none:
            assert held[0] is next(p.grad for p in model.parameters() if p.grad is not None)
        replica.detach()
        return places

    nodes = ((0, 1), (2, 3)) if name in ("daso", "a partition") else ((0,), (1,))
    for places in ThreadWorld(nodes=nodes).run(worker):
        assert all(place == places[0] for place in places)


@pytest.mark.parametrize("name", ["ddp", "lags", "a compressor"])
def test_gradient_surgery_equals_surgery_on_clones(name: str) -> None:
    """Two losses, whose gradients are combined into the one that is stepped on."""

    def worker(world: World, clone: bool) -> list[Tensor]:
        model = network()
        for p in model.parameters():
            nn.init.constant_(p, 0.1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        replica = offbeat.replicate(model, ALGORITHMS[name], mesh=world)
        for step in range(4):
            found = []
            for part in (1.0, -2.0):
                optimizer.zero_grad()
                backward(model, part * (1 + step + world.rank))
                grads = [p.grad for p in model.parameters()]
                found.append([g.clone() for g in grads if g is not None] if clone else grads)
            for p, first, second in zip(model.parameters(), *found, strict=True):
                p.grad = first + second
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
        replica.detach()
        return [p.detach() for p in model.parameters()]

    world = ThreadWorld(2)
    kept, cloned = (world.run(partial(worker, clone=clone)) for clone in (False, True))
    for ours, theirs in zip(kept, cloned, strict=True):
        assert all(map(torch.equal, ours, theirs))
