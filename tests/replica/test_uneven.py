"""Ranks with different numbers of batches; the cases of torch's tests of Join are among them."""

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

import offbeat
from crowd import Crowd
from offbeat.testing import ThreadWorld, snapshot
from offbeat.transport.world import World
from outcomes import alike, errors_of
from problems import START, Quadratic, flat, gradient, loss
from reference import weighted
from reference.participants import Array

pytestmark = pytest.mark.usefixtures("fast_heartbeat")

LENGTHS = (26, 18, 8)
RECIPES = (
    "ddp",
    "lags(density=0.2)",
    "slgs(density=0.2)",
    "local_sgd(every=8)",
    "local_sgd(every=8, within='local')",
    "diloco(every=7, fragments=2, delay=2)",
    "sparse_loco(every=8)",
    "noloco(every=8)",
    "sgp",
    "sgp(overlap=1)",
    "sgp('ring', within='local')",
    "d_psgd",
    "ad_psgd",
    "adasum(every=2)",
    "adasum(partition=True)",
    "daso(every=4, total_steps=26, warmup_steps=6, cooldown_steps=6)",
    "alone",
)


class Streamed(Iterable[Any]):
    """Batches that do not say how many there are."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def train(
    world: World, text: str, batches: Iterable[int], accumulate: int = 1, filler: int | None = None
) -> tuple[Array, list[int], int]:
    """Return the models after all steps and finish(), the batches seen, and the steps."""
    model = Quadratic()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    replica = offbeat.replicate(
        model, offbeat.algorithm(text), mesh=world, weighted=True, optimizer=optimizer
    )
    history, seen = [flat(snapshot(model))], []
    for number, batch in enumerate(replica.uneven(batches, filler), 1):
        seen.append(batch)
        replica.set_requires_sync(number % accumulate == 0)
        error = loss(model, world.rank, batch) / accumulate
        replica.report_loss(error * accumulate)
        error.backward()
        if number % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
            history.append(flat(snapshot(model)))
    replica.finish()
    steps = replica.steps
    replica.detach()
    return np.stack([*history, flat(snapshot(model))]), seen, steps


@pytest.mark.parametrize("text", RECIPES)
def test_every_recipe_trains_to_the_longest_end(text: str) -> None:
    nodes = [[0, 1], [2]] if "local" in text or "daso" in text else [[0], [1], [2]]
    lengths = (*LENGTHS, 13) if "partition" in text else LENGTHS
    nodes = [[0, 1], [2, 3]] if "partition" in text else nodes
    runs = ThreadWorld(nodes=nodes).run(
        lambda world: train(world, text, range(lengths[world.rank]))
    )
    for (history, seen, steps), length in zip(runs, lengths, strict=True):
        assert steps == LENGTHS[0]
        assert seen == [*range(length), *[length - 1] * (LENGTHS[0] - length)]
        np.testing.assert_allclose(history[-1], runs[0][0][-1], rtol=0, atol=1e-12)
        assert np.isfinite(history).all()


@pytest.mark.parametrize(("text", "is_sized"), [("ddp", False), ("local_sgd(every=4)", True)])
def test_each_batch_counts_once(text: str, is_sized: bool) -> None:
    """Also the last ones, and those of a window in which others have none; nothing else does."""
    lengths = (10, 7, 3)

    def worker(world: World) -> Array:
        own = range(lengths[world.rank])
        return train(world, text, own if is_sized else Streamed(own))[0]

    samples = np.array([[float(k < n) for n in lengths] for k in range(10)])
    run = START, gradient, samples
    theirs = (
        weighted.ddp(run, 0.05, 0.9)
        if text == "ddp"
        else weighted.local_sgd(run, 0.05, 0.9, every=4)
    )
    ours = np.array(ThreadWorld(3).run(worker)).swapaxes(0, 1)
    np.testing.assert_allclose(ours[:11], theirs, rtol=0, atol=1e-12)
    left = samples[8:].sum(axis=0)
    np.testing.assert_allclose(
        ours[-1, 0], theirs[-1, 0] if text == "ddp" else weighted.mean(theirs[-1], left), atol=1e-12
    )


def test_micro_batches_of_a_step_count_that_there_are() -> None:
    lengths = (8, 5)

    def worker(world: World) -> Array:
        return train(world, "ddp", range(lengths[world.rank]), accumulate=4)[0]

    ours = ThreadWorld(2).run(worker)
    z, velocity = START, np.zeros_like(START)
    for parts in ((4, 4), (4, 1)):
        means = [gradient(rank, z, 0) * part / 4 for rank, part in enumerate(parts)]
        velocity = 0.9 * velocity + np.mean(means, axis=0)
        z = z - 0.05 * velocity
    for history in ours:
        np.testing.assert_allclose(history[-1], z, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("iterations", "offset", "early", "is_sized"),
    [(0, 2, 1, True), (0, 10, 2, False), (5, 2, 2, True), (5, 3, 1, False)],
)
def test_ranks_that_join_early(iterations: int, offset: int, early: int, is_sized: bool) -> None:
    """torch's test_ddp_uneven_inputs: the first ranks end early, also before the first batch."""

    def worker(world: World) -> tuple[Array, int]:
        own = range(iterations + offset * (world.rank >= early))
        batches = own if is_sized else Streamed(own)
        history, _, steps = train(world, "ddp", batches, filler=99)
        return history, steps

    runs = ThreadWorld(3).run(worker)
    for history, steps in runs:
        assert steps == iterations + offset
        assert (history == runs[0][0]).all(), "replicas stay equal in every step"


class Branches(nn.Module):
    """Normalizes, and leaves a branch out on some batches."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.BatchNorm1d(2), nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x: Tensor, is_used: bool) -> Tensor:
        x = self.norm(x)
        return self.a(x) + self.b(x) if is_used else self.a(x)


@pytest.mark.parametrize("text", ["ddp", "lags(density=0.5)"])
def test_unused_parameters_and_buffers(text: str) -> None:
    """A branch that only a rank without data uses has no gradient anywhere."""

    def worker(world: World) -> list[Tensor]:
        torch.manual_seed(world.rank)
        model = Branches()
        optimizer = Adam(model.parameters(), lr=0.1, weight_decay=0.1)
        replica = offbeat.replicate(
            model, offbeat.algorithm(text), mesh=world, weighted=True, optimizer=optimizer
        )
        batches = [torch.randn(4, 2) for _ in range((3, 9)[world.rank])]
        for number, x in enumerate(replica.uneven(batches)):
            model(x, number < 3 or world.rank == 0).square().mean().backward()
            assert number < 3 or all(p.grad is None for p in model.b.parameters())
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
        replica.finish()
        replica.detach()
        moments = [v for state in optimizer.state.values() for v in state.values()]
        return [*model.state_dict().values(), *moments]

    first, second = ThreadWorld(2).run(worker)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_repeated_batch_that_is_not_finite_reaches_nobody() -> None:
    def worker(world: World) -> bool:
        model = nn.Linear(1, 1)
        replica = offbeat.replicate(model, offbeat.lags(density=1.0), mesh=world, weighted=True)
        optimizer = SGD(model.parameters(), lr=0.1)
        nan = torch.full((1, 1), torch.nan)
        for x in replica.uneven([torch.ones(1, 1)] * (2 * world.rank), nan):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
        replica.detach()
        return all(bool(p.isfinite().all()) for p in model.parameters())

    assert ThreadWorld(2).run(worker) == [True, True]


@pytest.mark.fault("a rank has no batch at all while others train", "ValueError on all ranks")
@pytest.mark.parametrize("is_sized", [True, False])
def test_a_rank_without_any_batch_needs_a_filler(is_sized: bool) -> None:
    def worker(world: World) -> None:
        own = range(2 * world.rank)
        train(world, "ddp", own if is_sized else Streamed(own))

    assert "rank 0 has no batch to repeat" in alike(worker)


@pytest.mark.fault("a rank leaves the loop of uneven() early", "ValueError on all ranks; no hang")
def test_a_rank_that_breaks_is_an_error() -> None:
    def worker(world: World) -> None:
        model = Quadratic()
        replica = offbeat.replicate(model, offbeat.ddp(), mesh=world, weighted=True)
        try:
            for batch in replica.uneven(range(5)):
                if world.rank and batch == 2:
                    break
                loss(model, world.rank, batch).backward()
                replica.step()
            replica.finish()
        finally:
            replica.detach()

    assert {type(error) for error in errors_of(worker, 2)} == {ValueError}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("text", "is_sized"), [("ddp", True), ("local_sgd(every=3)", False)])
@pytest.mark.fault(
    "a rank is lost or joins while some have no more data, with uneven()",
    "all end together; each batch counts once",
)
def test_a_loss_and_a_join_among_uneven_ranks(text: str, is_sized: bool) -> None:
    """A run of three: one of them is lost, and the one that joins has more batches than any."""
    lengths = {0: 60, 1: 60, 2: 12, 3: 90}

    def work(world: World) -> tuple[list[int], int, Array] | None:
        model = Quadratic()
        algorithm = offbeat.algorithm(text)
        replica = offbeat.replicate(model, algorithm, mesh=world, elastic=True, weighted=True)
        own, seen = range(lengths[replica.world.rank]), list[int]()
        for batch in replica.uneven(own if is_sized else Streamed(own)):
            time.sleep(0.02)
            loss(model, replica.world.rank, batch).backward()
            model.zero_grad()
            seen.append(batch)
            if world.rank == 1 and len(seen) == 8:
                links = replica._connection.links
                assert links is not None
                links.heartbeat._end_thread()
                return None
            replica.step()
        replica.finish()
        assert [entry["rank"] for entry in replica.lost] == [1]
        assert [entry["rank"] for entry in replica.joined] == [3]
        steps = replica.steps
        replica.detach()
        return seen, steps, flat(snapshot(model))

    crowd = Crowd(3, work)
    crowd.come(crowd.world.newcomer(), after=0.3)
    first, gone, second, third = crowd.all()
    assert gone is None
    for rank, found in ((0, first), (2, second), (3, third)):
        assert isinstance(found, tuple), found
        seen, steps, end = found
        assert steps == first[1], "all end together"
        assert [*dict.fromkeys(seen)] == [*range(lengths[rank])], "each of its batches"
        np.testing.assert_allclose(end, first[2], rtol=0, atol=1e-12)


@pytest.mark.usefixtures("impatient")
def test_a_rank_that_is_lost_and_comes_back_between_two_batches() -> None:
    """The ranks are the same in the next batch, but one of them begins."""

    def train(world: World, dies: bool) -> tuple[int, int, int, int] | None:
        model = Quadratic()
        replica = offbeat.replicate(model, offbeat.ddp(), mesh=world, elastic=True, weighted=True)
        seen = 0
        for batch in replica.uneven(range(8)):
            time.sleep(0.8 if replica.steps in (2, 3, 4) else 0.02)
            loss(model, world.rank, batch).backward()
            model.zero_grad()
            seen += 1
            if dies and seen == 3:
                links = replica._connection.links
                assert links is not None
                links.heartbeat._end_thread()
                return None
            replica.step()
        found = seen, replica.steps, len(replica.lost), len(replica.joined)
        replica.detach()
        return found

    def work(world: World) -> tuple[int, int, int, int] | None:
        return (world.rank == 1 and train(world, True)) or train(world, False)

    first, back, third = ThreadWorld(3).run(work)
    assert first == third
    assert back is not None
    assert first is not None
    assert back[0] == 8, "each of its batches"
    assert back[1:] == first[1:]
    assert first[2:] == (1, 1)


def test_uneven_is_declared_at_the_attach() -> None:
    def worker(world: World) -> None:
        replica = offbeat.replicate(Quadratic(), offbeat.ddp(), mesh=world)
        try:
            for _ in replica.uneven(range(5)):
                pass
        finally:
            replica.detach()

    assert "weighted=True" in alike(worker)


@pytest.mark.usefixtures("impatient")
@pytest.mark.fault(
    "some find a loss a step later than others, with uneven()",
    "the others agree on the batches left after the same step",
    group="Losses that a run survives",
)
def test_a_loss_that_ranks_find_in_different_steps() -> None:
    """Rank 1 has made a step without an exchange, in which rank 0 finds the loss."""
    is_ahead = threading.Event()

    def work(world: World) -> tuple[int, int] | None:
        model = Quadratic()
        algorithm = offbeat.local_sgd(every=100)
        replica = offbeat.replicate(model, algorithm, mesh=world, elastic=True, weighted=True)
        heartbeat, seen = replica._connection.heartbeat, 0
        assert heartbeat is not None
        for batch in replica.uneven(range(12)):
            loss(model, world.rank, batch).backward()
            model.zero_grad()
            seen += 1
            if world.rank == 2 and seen == 4:
                assert is_ahead.wait(30)
                heartbeat._end_thread()
                return None
            if seen == (4 if world.rank == 0 else 5):
                is_ahead.set() if world.rank == 1 else None
                until = time.monotonic() + 30
                while not heartbeat.has_agreed_error and time.monotonic() < until:
                    time.sleep(0.01)
            replica.step()
        replica.finish()
        result = seen, replica.steps
        replica.detach()
        return result

    assert ThreadWorld(3).run(work) == [(12, 12), (12, 12), None]
