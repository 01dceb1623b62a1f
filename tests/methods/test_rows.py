"""Sparse gradients are averaged as rows, or densely where that is fewer bytes."""

import random
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, SparseAdam

import offbeat
from offbeat.testing import ThreadWorld
from offbeat.transport.links import Links
from offbeat.transport.world import World
from reference.rows import SparseAdam as ReferenceAdam
from reference.rows import mean_rows

WIDTH = 3

Draw = list[int] | None  # the rows that a rank reads, or None for no backward of the table


class Tables(nn.Module):
    """``sum_t c_t . row_t`` of two tables, with coefficients of the rank; and a dense bias."""

    def __init__(self, rows: Sequence[int], dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.Embedding(n, WIDTH, sparse=True, _weight=torch.ones(n, WIDTH, dtype=dtype))
            for n in rows
        )
        self.bias = nn.Parameter(torch.ones(WIDTH, dtype=dtype))

    def forward(self, reads: Sequence[Draw], rank: int) -> Tensor:
        found = self.bias.sum() * (rank + 1)
        for table, rows in zip(self.tables, reads, strict=True):
            if rows is not None:
                factors = torch.tensor(coefficients(rows, rank)).to(self.bias)
                found = found + (table(torch.tensor(rows, dtype=torch.int32)) * factors).sum()
        return found


def coefficients(rows: Sequence[int], rank: int) -> np.ndarray:
    return np.random.default_rng(rank).normal(size=(len(rows), WIDTH))


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("ddp", torch.float32),
        ("ddp", torch.bfloat16),
        ("ddp(wire='bf16')", torch.float64),
        ("ddp(wire='bf16')", torch.float16),
        ("lags(density=0.2)", torch.float64),
        ("slgs", torch.bfloat16),
    ],
    ids=str,
)
def test_gradients_are_the_weighted_mean_of_the_rows_of_all(
    text: str, dtype: torch.dtype, draws: random.Random
) -> None:
    """Few rows of many, most of few, none, or no gradient; ranks with different weights."""
    size, steps, lengths = 3, 12, (4, 40)

    def draw(n: int) -> Draw:
        return draws.choice([None, [], *(draws.choices(range(n), k=k) for k in (1, 3, 2 * n))])

    reads = [[[draw(n) for n in lengths] for _ in range(size)] for _ in range(steps)]
    samples = [[*draws.choices([0, 1, 2, 5], k=size - 1), 1] for _ in range(steps)]

    def work(world: World) -> list[list[Tensor | None]]:
        model, seen = Tables(lengths, dtype), []
        replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world, weighted=True)
        for step in range(steps):
            replica.set_weight(samples[step][world.rank])
            model(reads[step][world.rank], world.rank).backward()
            seen.append([table.weight.grad for table in model.tables])
            model.zero_grad()
            replica.step()
        replica.detach()
        return seen

    everyone = ThreadWorld(size).run(work)
    is_exact = dtype in (torch.float64, torch.float32) and "bf16" not in text
    rounding = 8 * torch.finfo(dtype if is_exact else torch.bfloat16).eps
    for step, table in product(range(steps), range(2)):
        shares = np.array(samples[step]) / sum(samples[step])
        given = [
            None if (rows := read[table]) is None or not share else (rows, coefficients(rows, rank))
            for rank, (read, share) in enumerate(zip(reads[step], shares, strict=True))
        ]
        total, touched = mean_rows(given, shares, (lengths[table], WIDTH))
        first, *others = (seen[step][table] for seen in everyone)
        if first is None:
            assert given == [None] * size
            assert others == [None] * (size - 1)
            continue
        assert first.is_coalesced()
        assert first.dtype is dtype
        assert first.indices()[0].tolist() == touched
        np.testing.assert_allclose(first.to_dense().double(), total, rtol=rounding, atol=rounding)
        for other in others:
            assert torch.equal(other.indices(), first.indices())
            assert torch.equal(other.values(), first.values())


def gradients(model: nn.Module, rank: int, step: Callable[[], Any]) -> list[Tensor]:
    seen = []
    for k in range(4):
        model([[rank, 5 + k, 5 + k, 40 * rank + k]], rank).backward()
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        step()
    return seen


def test_two_ranks_have_the_bits_of_torch() -> None:
    def ours(world: World) -> list[Tensor]:
        model = Tables([1000], torch.float32)
        replica = offbeat.replicate(model, offbeat.ddp(), mesh=world)
        seen = gradients(model, world.rank, replica.step)
        replica.detach()
        return seen

    def theirs(world: World) -> list[Tensor]:
        links = Links.connect(world)
        group = links.open("world")
        assert group is not None
        model = DistributedDataParallel(
            Tables([1000], torch.float32), process_group=group.process_group
        )
        seen = gradients(model, world.rank, lambda: None)
        links.close()
        return seen

    world = ThreadWorld(2)
    for mine, other in zip(world.run(ours), world.run(theirs), strict=True):
        assert [g.layout for g in mine] == [g.layout for g in other]
        assert all(
            torch.equal(a.to_dense(), b.to_dense()) for a, b in zip(mine, other, strict=True)
        )


def test_sparse_adam_follows_its_reference_with_micro_batches() -> None:
    """The moments of a row that any rank has read move on all ranks, of others on none."""
    rows, size = 30, 3
    reads = [[[(7 * r + 3 * k + part) % rows, r] for r in range(size)] for k in range(8)
             for part in range(2)]  # fmt: skip

    def work(world: World) -> list[np.ndarray]:
        model = Tables([rows])
        (table,) = model.tables
        replica = offbeat.replicate(model, offbeat.ddp(), mesh=world)
        optimizers = SparseAdam([table.weight], lr=0.1), SGD([model.bias], lr=0.1)
        seen = []
        for micro, draw in enumerate(reads):
            replica.set_requires_sync(micro % 2 == 1)
            (model([draw[world.rank]], world.rank) / 2).backward()
            if micro % 2 == 1:
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                replica.step()
                seen.append(table.weight.detach().numpy().copy())
        replica.detach()
        return seen

    table = np.ones((rows, WIDTH))
    adam, expected = ReferenceAdam(table.shape, 0.1), []
    for first, second in zip(reads[::2], reads[1::2], strict=True):
        parts = [(d, coefficients(d, r) / 2) for draw in (first, second)
                 for r, d in enumerate(draw)]  # fmt: skip
        table = adam.step(table, *mean_rows(parts, [1 / size] * 2 * size, table.shape))
        expected.append(table)
    for seen in ThreadWorld(size).run(work):
        np.testing.assert_allclose(seen, expected, rtol=0, atol=1e-12)


def test_bytes_of_a_million_rows_of_which_one_percent_is_touched() -> None:
    size = 4
    rows, width = 2**20, 8
    touched = rows // 100

    def work(world: World) -> int:
        model = nn.Embedding(rows, width, sparse=True, _weight=torch.zeros(rows, width))
        replica = offbeat.replicate(model, offbeat.ddp(broadcast_buffers=False), mesh=world)
        for _ in range(2):  # the first also agrees on the order
            model(torch.randperm(rows)[:touched]).sum().backward()
            model.zero_grad()
            replica.step()
        sent = replica.stats()["last"]["bytes_sent"]
        replica.detach()
        return sent

    dense = 2 * (size - 1) * rows * width * 4 // size
    for sent in ThreadWorld(size).run(work):
        assert sent == (size - 1) * (touched * (width * 4 + 4) + 16)
        assert 20 * sent < dense
