"""Adasum of sparse embeddings: of their tables only rows that some rank has changed are sent."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD

import offbeat
from offbeat.testing import ThreadWorld
from offbeat.transport.world import World
from reference.adasum import combine_layers

WIDTH = 3


class Tables(nn.Module):
    """Two sparse embeddings and a dense layer between them, which the test moves itself."""

    def __init__(self, lengths: tuple[int, int] = (400, 60)) -> None:
        super().__init__()
        self.long, self.short = (
            nn.Embedding(n, WIDTH, sparse=True, _weight=torch.zeros(n, WIDTH).double())
            for n in lengths
        )
        self.bias = nn.Parameter(torch.zeros(5, dtype=torch.float64))

    def move(self, rows: tuple[list[int], list[int]], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for table, touched in zip((self.long, self.short), rows, strict=True):
                table.weight[touched] += torch.randn(
                    len(touched), WIDTH, generator=generator, dtype=torch.float64
                )
            self.bias += torch.randn(5, generator=generator, dtype=torch.float64)

    def vector(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.parameters()])


@pytest.mark.parametrize(("method", "size"), [("auto", 2), ("gram", 3), ("rvhdd", 4), ("rvhdd", 2)])
def test_equals_adasum_of_whole_tables(method: Any, size: int, draws: random.Random) -> None:
    """Few rows, none, or so many that a table goes whole; some of several ranks."""
    steps = 5
    drawn = [
        [
            tuple(draws.sample(range(n), k=draws.choice([0, 1, 2, n // 2])) for n in (400, 60))
            for _ in range(size)
        ]
        for _ in range(steps)
    ]

    def work(world: World) -> list[torch.Tensor]:
        model, seen = Tables(), []
        replica = offbeat.replicate(model, offbeat.adasum(method=method), mesh=world)
        for step, rows in enumerate(drawn):
            before = model.vector()
            model.move(rows[world.rank], 100 * step + world.rank)
            seen += [before, model.vector() - before]
            replica.step()
        seen.append(model.vector())
        replica.detach()
        return seen

    runs = ThreadWorld(size).run(work)
    layers = [p.numel() for p in Tables().parameters()]
    for step in range(steps):
        before, after = runs[0][2 * step], runs[0][2 * step + 2]
        assert all(torch.equal(run[2 * step + 2], after) for run in runs)
        updates = np.stack([run[2 * step + 1].numpy() for run in runs])
        expected = before.numpy() + combine_layers(updates, layers)
        np.testing.assert_allclose(after.numpy(), expected, rtol=0, atol=1e-12)


def test_a_bad_row_on_one_rank_is_the_same_error_on_all() -> None:
    def work(world: World) -> str:
        model = Tables()
        replica = offbeat.replicate(model, offbeat.adasum(), mesh=world)
        model.move(([7], []), 0)
        with torch.no_grad():
            model.short.weight[5] += torch.nan if world.rank == 1 else 0
        with pytest.raises(ValueError, match="rank 1") as error:
            replica.step()
        return str(error.value)

    first, second = ThreadWorld(2).run(work)
    assert first == second
    assert "'short.weight'" in first


def test_bytes_of_a_million_rows_of_which_one_percent_is_touched() -> None:
    size = 4
    rows, width = 2**20, 8
    touched = rows // 100

    def work(world: World) -> int:
        model = nn.Embedding(rows, width, sparse=True, _weight=torch.zeros(rows, width))
        optimizer = SGD(model.parameters(), lr=0.1)
        replica = offbeat.replicate(model, offbeat.adasum(), mesh=world)
        for _ in range(2):  # the first also asks which kernels all have
            model(torch.randperm(rows)[:touched]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
        sent: int = replica.stats()["last"]["bytes_sent"]
        replica.detach()
        return sent

    dense = 2 * (size - 1) * rows * width * 4 / size
    for sent in ThreadWorld(size).run(work):
        assert 20 * sent < dense
