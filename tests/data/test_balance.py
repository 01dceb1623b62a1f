"""Sizes of batches that follow the speeds of ranks."""

import itertools
import random
import time

import pytest
import torch
from torch import nn

import offbeat
from offbeat.data import ElasticSampler, balanced_sizes
from offbeat.testing import ThreadWorld
from offbeat.transport.world import World
from outcomes import alike


def slowest(sizes: list[int], seconds: list[float], fixed: list[float]) -> float:
    return max(f + s * n for f, s, n in zip(fixed, seconds, sizes, strict=True))


def test_no_other_sizes_of_that_sum_take_less_time(draws: random.Random) -> None:
    for _ in range(200):
        ranks, most = draws.randint(1, 4), draws.randint(2, 9)
        total = draws.randint(ranks, ranks * most)
        seconds = [draws.choice((1.0, 2.0, 3.5)) for _ in range(ranks)]
        fixed = [draws.choice((0.0, 0.5, 4.0)) for _ in range(ranks)]
        sizes = balanced_sizes(seconds, total=total, most=most, fixed=fixed)
        assert sum(sizes) == total
        every = itertools.product(range(1, most + 1), repeat=ranks)
        best = min(slowest([*each], seconds, fixed) for each in every if sum(each) == total)
        assert slowest(sizes, seconds, fixed) == best


def test_the_fastest_rank_takes_the_most(draws: random.Random) -> None:
    for _ in range(200):
        ranks, most = draws.randint(1, 6), draws.randint(1, 99)
        seconds = [draws.uniform(0.1, 3) for _ in range(ranks)]
        fixed = [draws.choice((0.0, 0.5, 4.0)) for _ in range(ranks)]
        sizes = balanced_sizes(seconds, most=most, fixed=fixed)
        limit = min(f + s * most for f, s in zip(fixed, seconds, strict=True))
        for n, s, f in zip(sizes, seconds, fixed, strict=True):
            assert n in (1, most) or f + s * n <= limit * (1 + 1e-9) < f + s * (n + 1)
        assert max(sizes) == most


def test_many_ranks_take_little_time() -> None:
    seconds = [1.0 + rank % 7 for rank in range(4096)]
    assert sum(balanced_sizes(seconds, total=2**20)) == 2**20


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"seconds": [1.0, 0.0], "total": 4}, "expected a time above 0 for each rank"),
        ({"seconds": [], "total": 4}, "expected a time above 0"),
        ({"seconds": [1.0, float("nan")], "total": 4}, "expected a time above 0"),
        ({"seconds": [1.0, 1.0], "total": 4, "fixed": [0.1]}, "for each of 2 ranks"),
        ({"seconds": [1.0]}, "pass the sum of the sizes"),
        ({"seconds": [1.0], "most": 0}, "most=0, expected 1 or more"),
        ({"seconds": [1.0, 1.0], "total": 1}, "total=1 with most=None, expected 2 or more"),
        ({"seconds": [1.0, 1.0], "total": 9, "most": 4}, "total=9 with most=4"),
    ],
)
def test_sizes_that_do_not_exist_are_an_error(given: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        balanced_sizes(**given)  # type: ignore[arg-type]


X = torch.linspace(-1, 1, 160, dtype=torch.float64).view(-1, 1)


def fit(world: World, batch: int, slow: float) -> tuple[list[torch.Tensor], list[int], list[int]]:
    """Return the parameters, the samples used, and the sizes of the last whole batches."""
    model = nn.Linear(1, 1, dtype=torch.float64)
    with torch.no_grad():
        model.weight.fill_(1.0), model.bias.fill_(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = offbeat.replicate(model, offbeat.ddp(), mesh=world, weighted=True)
    sampler, used = ElasticSampler(160, batch, replica, most=4 * batch), list[int]()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for samples in sampler:
            time.sleep(slow * len(samples))
            replica.set_weight(len(samples))
            (model(X[samples]) - X[samples].sin()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
            used += samples
    sizes = [*sampler.balance().values()]
    replica.detach()
    return [p.detach() for p in model.parameters()], used, sizes


def test_a_slow_rank_takes_less_of_the_same_batches() -> None:
    """One process trains as well with the whole batch of each step."""
    ((whole, _, _),) = ThreadWorld(1).run(lambda world: fit(world, 24, 0.0))
    ranks = ThreadWorld(3).run(lambda world: fit(world, 8, 0.012 if world.rank == 1 else 0.003))
    for found, _, sizes in ranks:
        assert sizes == ranks[0][2]
        assert sizes[1] < 8 < min(sizes[0], sizes[2]), sizes
        for ours, theirs in zip(found, whole, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    used = sorted(sample for _, samples, _ in ranks for sample in samples)
    assert used == sorted([*range(160)] * 3)


@pytest.mark.parametrize(
    ("most", "weighted", "said"),
    [(8, False, "use replicate"), (3, True, "batch_size=4 or more"), (4.5, True, "most=4.5")],
)
def test_sizes_need_weights_and_room(most: int, weighted: bool, said: str) -> None:
    def work(world: World) -> None:
        replica = offbeat.replicate(nn.Linear(1, 1), offbeat.ddp(), mesh=world, weighted=weighted)
        try:
            ElasticSampler(90, 4, replica, most=most)
        finally:
            replica.detach()

    assert said in alike(work)
