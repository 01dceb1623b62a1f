"""The example of a compressor that remembers: 1-bit Adam, beside its reference and beside Adam."""

import copy
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam

import offbeat
from offbeat.methods import Compressed
from offbeat.testing import ThreadWorld
from offbeat.transport.world import World
from problems import CURVATURES, OPTIMA, START, gradient
from reference.one_bit_adam import one_bit_adam as reference

EXAMPLES = Path(__file__).parent.parent / "examples"
Loss = Callable[[nn.Module, int, int], Tensor]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return import_module("one_bit_adam")


def steps(
    example: Any, world: World, model: nn.Module, loss: Loss, number: int, warmup: int, fall: float
) -> list[tuple[Tensor, int]]:
    """Return the parameters and the bytes sent, after each step; the rate falls to 1 - ``fall``."""
    optimizer, seen = Adam(model.parameters()), []
    replica = offbeat.replicate(model, offbeat.ddp(), mesh=world, optimizer=optimizer)
    for step in range(number):
        if step == warmup:
            replica.detach()
            optimizer = example.frozen(optimizer)
            algorithm = offbeat.Algorithm(Compressed(compressor=example.OneBit))
            replica = offbeat.replicate(model, algorithm, mesh=world, optimizer=optimizer)
        loss(model, world.rank, step).backward()
        optimizer.param_groups[0]["lr"] = 0.01 * (1 - fall * step / number)
        optimizer.step()
        optimizer.zero_grad()
        replica.step()
        flat = nn.utils.parameters_to_vector(model.parameters()).detach()
        seen.append((flat, replica.stats()["last"]["bytes_sent"]))
    replica.detach()
    return seen


class Point(nn.Module):
    """The quadratic of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor(START))

    def forward(self, rank: int) -> Tensor:
        far = self.x - torch.tensor(OPTIMA[rank])
        return 0.5 * (torch.tensor(CURVATURES[rank]) * far.square()).sum()


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_follows_the_reference(example: Any, size: int) -> None:
    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        found: Tensor = model(rank)
        return found

    runs = ThreadWorld(size).run(lambda w: steps(example, w, Point(), loss, 40, 10, 0.0))
    ours = np.array([[x.numpy() for x, _ in run] for run in runs])
    assert (ours == ours[:1]).all()
    theirs = reference(START, gradient, size=size, warmup=10, steps=40, lr=0.01)
    np.testing.assert_allclose(ours[0], theirs[1:], rtol=0, atol=1e-12)


def test_comes_near_the_loss_of_adam_with_a_thirtieth_of_the_bytes(example: Any) -> None:
    """A network that predicts the next of eight characters of source code."""
    text = import_module("char_gpt").read_corpus()[0][:100_000]
    batches = torch.randint(len(text) - 9, (2, 250, 64), generator=torch.Generator().manual_seed(0))

    start = nn.Sequential(
        nn.Embedding(101, 16), nn.Flatten(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 101)
    )

    def loss_at(model: nn.Module, starts: Tensor) -> Tensor:
        window = text[starts[:, None] + torch.arange(9)]
        return cross_entropy(model(window[:, :-1]), window[:, -1])

    def work(world: World, warmup: int) -> tuple[float, int]:
        model = copy.deepcopy(start)
        loss = lambda m, r, k: loss_at(m, batches[r, k])  # noqa: E731
        seen = steps(example, world, model, loss, 250, warmup, 1.0)
        with torch.no_grad():
            return loss_at(model, torch.arange(0, len(text) - 9, 10)).item(), seen[-1][1]

    dense, compressed = (ThreadWorld(2).run(lambda w, k=k: work(w, k))[0] for k in (250, 50))
    assert dense[0] < 2.2
    assert compressed[0] < 1.05 * dense[0]
    assert 31 * compressed[1] < dense[1]
