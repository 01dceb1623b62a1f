"""Optimizers whose step communicates: harmless where gradients are equal, noticed elsewhere."""

import warnings
from multiprocessing import Queue
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import offbeat
from offbeat.replica.backward.shared_steps import have_equal_gradients
from offbeat.testing import ThreadWorld
from offbeat.transport.world import World
from ranks import Spawned


class Reducing(SGD):
    """Averages gradients itself."""

    def step(self, closure: Any = None) -> None:
        loss = closure() if closure is not None else None
        if closure is None:
            for group in self.param_groups:
                for p in group["params"]:
                    dist.all_reduce(p.grad)
                    p.grad /= dist.get_world_size()
        super().step()
        return loss


def sharding(model: nn.Module) -> Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of deprecated code in torch

    return ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)


def reducing(model: nn.Module) -> SGD:
    return Reducing(model.parameters(), lr=0.1)


def plain(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.1)


def train(rank: int, make: Any, text: str, *, in_closure: bool = False) -> tuple[str, list[str]]:
    """The error or the trained model, and the warnings, of three steps."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = make(model)
    replica = offbeat.replicate(model, offbeat.algorithm(text))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(3) * (rank + 1)).square().sum()
        loss.backward()
        dist.all_reduce(loss.detach().clone())  # as a log or a metric does
        return loss

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for _ in range(3):
                optimizer.step(closure) if in_closure else (closure(), optimizer.step())
                replica.step()
            found = str([p.tolist() for p in model.parameters()])
        except ValueError as error:
            found = str(error)
    replica.detach()
    return found, [str(w.message) for w in caught if w.category is RuntimeWarning]


def trainings(rank: int, results: "Queue[Any]") -> None:
    results.put(
        {
            "plain": train(rank, plain, "ddp"),
            "equal": [train(rank, make, "ddp") for make in (sharding, reducing)],
            "closure": train(rank, reducing, "sgp", in_closure=True),
            "reducing": train(rank, reducing, "sgp"),
            "sharding": train(rank, sharding, "sgp"),
        }
    )


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return Spawned(trainings, 2).join(timeout=60)


@pytest.mark.processes
@pytest.mark.fault(
    "ZeroRedundancyOptimizer where gradients differ",
    "ValueError on all ranks in the first step",
    group="Settings and arguments",
)
def test_a_sharding_optimizer_needs_equal_gradients(found: list[dict[str, Any]]) -> None:
    for rank in found:
        error, _ = rank["sharding"]
        assert "ZeroRedundancyOptimizer steps each parameter on one of the ranks [0, 1]" in error
        assert rank["equal"][0] == rank["plain"]


@pytest.mark.processes
@pytest.mark.fault(
    "an optimizer communicates where gradients differ",
    "RuntimeWarning, once; names the optimizer",
    group="Settings and arguments",
)
def test_an_optimizer_that_communicates_is_named(found: list[dict[str, Any]]) -> None:
    for rank in found:
        _, (warning,) = rank["reducing"]
        assert "Reducing communicates in its step()" in warning
        assert rank["equal"][1] == rank["plain"]
        assert rank["closure"][1] == []


def test_a_first_step_that_raises_is_no_mark_for_later_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever communicates in between is not that optimizer."""
    launched = {0}
    monkeypatch.setattr(
        "offbeat.replica.backward.watch.collectives_launched", lambda: max(launched)
    )

    class Failing(SGD):
        def step(self, closure: Any = None) -> None:
            raise ArithmeticError

    def work(world: World) -> list[str]:
        model = nn.Linear(2, 2)
        replica = offbeat.replicate(model, offbeat.sgp(), mesh=world)
        model(torch.ones(2)).sum().backward()
        with pytest.raises(ArithmeticError):
            Failing(model.parameters()).step()
        replica.step()
        replica.gather("")  # all are past their first step: threads share the hooks of optimizers
        launched.add(1)
        plain(model).step()
        replica.step()
        replica.detach()
        return replica.notes

    assert ThreadWorld(2).run(work) == [[], []]


def test_gradients_are_equal_on_the_ranks_of_a_node() -> None:
    def work(world: World) -> list[bool]:
        replica = offbeat.replicate(nn.Linear(2, 2), offbeat.sgp(within="local"), mesh=world)
        pairs = ((0, 1), (2, 3)) if world.rank < 2 else ((2, 3), (0, 1))
        return [have_equal_gradients(ranks, replica.gradients) for ranks in (*pairs, (0, 2), (1,))]

    assert ThreadWorld(nodes=[[0, 1], [2, 3]]).run(work) == [[True, False, False, True]] * 4
