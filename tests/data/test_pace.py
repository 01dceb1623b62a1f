"""Ranks that compute slower make fewer steps between two exchanges."""

import itertools
import random
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.optim import SGD

import offbeat
from offbeat.data import ElasticSampler
from offbeat.data.balance import repaced
from offbeat.telemetry.recording import read_run
from offbeat.testing import ThreadWorld, snapshot
from offbeat.transport.world import World
from outcomes import alike
from problems import START, Quadratic, flat, gradient, loss
from reference import weighted
from reference.participants import Array

pytestmark = pytest.mark.usefixtures("fast_heartbeat")

LENGTH, WINDOW, EPOCHS = 600, 6, 2
PARTS = (slice(0, 6), slice(6, 9))  # the fragments of the quadratic: `matrix` and `vector`
REFERENCES: dict[str, Callable[..., Array]] = {
    "local_sgd(every=6)": partial(weighted.local_sgd, every=6),
    "diloco(every=6)": partial(weighted.diloco, every=6),
    "diloco(every=6, fragments=2, delay=2)": partial(
        weighted.diloco, every=6, fragments=PARTS, delay=2, mixing=0.5
    ),
}
OTHERS = "sparse_loco(every=6)", "noloco(every=6)", "adasum(every=6)", "sgp(overlap=1)"


def test_most_steps_are_made_in_the_time_of_a_window(draws: random.Random) -> None:
    for _ in range(200):
        window, ranks = draws.randint(1, 9), draws.randint(1, 3)
        seconds = [draws.uniform(1, 6) for _ in range(ranks)]
        found = repaced([window] * ranks, seconds, window) or [window] * ranks
        assert max(found) == window
        assert min(found) >= window / 8
        made = sum(found) / max(s * m for s, m in zip(seconds, found, strict=True))
        for steps in itertools.product(range(1, window + 1), repeat=ranks):
            if max(steps) == window and min(steps) >= window / 8:
                others = sum(steps) / max(s * m for s, m in zip(seconds, steps, strict=True))
                assert made >= others / 1.03
        assert repaced(found, seconds, window) is None, "nothing is gained any more"
    assert repaced([8, 8], [0.01, 0.0], 8) is None, "one is not known"
    assert repaced([8, 8], [0.01, 1.0], 8) == [8, 1], "one in eight"


def train(world: World, text: str) -> tuple[dict[int, Array], list[list[int]], dict[int, int]]:
    """Return the models after the steps of this rank, by number, and its batches, by epoch."""
    model = Quadratic()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    replica = offbeat.replicate(
        model, offbeat.algorithm(text), mesh=world, weighted=True, optimizer=optimizer
    )
    sampler = ElasticSampler(LENGTH, 4, replica, window=WINDOW)
    models, sizes, epochs = dict[int, Array](), dict[int, int](), list[list[int]]()
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        epochs.append([])
        for batch in sampler:
            time.sleep(0.04 if world.rank == 1 else 0.01)
            number = replica.steps
            replica.set_weight(len(batch))
            loss(model, world.rank, number).backward()
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
            epochs[-1] += batch
            sizes[number] = len(batch)
            models[replica.steps] = flat(snapshot(model))
    replica.finish()
    assert sampler.stats()["left"] == 0
    models[-1] = flat(snapshot(model))
    replica.detach()
    return models, epochs, sizes


@pytest.mark.parametrize("text", [*REFERENCES, *OTHERS])
def test_a_slow_rank_rests_and_the_mean_is_weighted(text: str) -> None:
    runs = ThreadWorld(3).run(lambda world: train(world, text))
    for epoch in range(EPOCHS):
        used = Counter(sample for _, epochs, _ in runs for sample in epochs[epoch])
        assert used == dict.fromkeys(range(LENGTH), 1)
    steps = {max(sizes) for _, _, sizes in runs}
    number = {max(number for number in models) for models, _, _ in runs}
    assert len(number) == 1, "all end with the same number of steps"
    assert len(runs[1][2]) < 0.8 * len(runs[0][2]), "the slow one makes fewer"
    for models, _, _ in runs:
        np.testing.assert_allclose(models[-1], runs[0][0][-1], rtol=0, atol=1e-12)
    if text not in REFERENCES:
        return
    samples = np.full((max(steps) + 1, 3), np.nan)
    for rank, (_, _, sizes) in enumerate(runs):
        samples[[*sizes], rank] = [*sizes.values()]
    theirs = REFERENCES[text]((START, gradient, samples), 0.05, 0.9)
    for rank, (models, _, _) in enumerate(runs):
        for after, ours in models.items():
            if after >= 0:  # only the order of sums differs
                np.testing.assert_allclose(ours, theirs[after, rank], rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("given", "text", "said"),
    [
        ({"window": 0}, "local_sgd(every=6)", "window=0, expected"),
        ({"window": 6, "most": 9}, "local_sgd(every=6)", "smaller batches or fewer; pass one"),
        ({"window": 6}, "ddp", "exchanges gradients in each step; use most="),
        ({"window": 6}, "unweighted", "use replicate"),
    ],
)
def test_what_a_window_needs(given: dict[str, Any], text: str, said: str) -> None:
    def work(world: World) -> None:
        algorithm = offbeat.algorithm("local_sgd" if text == "unweighted" else text)
        is_weighted = text != "unweighted"
        replica = offbeat.replicate(Quadratic(), algorithm, mesh=world, weighted=is_weighted)
        try:
            ElasticSampler(90, 4, replica, **given)
        finally:
            replica.detach()

    assert said in alike(work)


@pytest.mark.parametrize("following", ["ddp", "lags(density=0.5)"])
def test_no_switch_to_gradients_while_ranks_rest(following: str) -> None:
    """One error on all ranks, before anything has changed."""

    def work(world: World) -> None:
        algorithm = offbeat.algorithm("local_sgd(every=6)")
        replica = offbeat.replicate(Quadratic(), algorithm, mesh=world, weighted=True)
        sampler = ElasticSampler(90, 4, replica, window=6)
        try:
            replica.switch(following)
        finally:
            assert replica.algorithm == algorithm
            with pytest.raises(TypeError, match="follows from its speed"):
                len(sampler)
            replica.detach()

    assert "use most= in place of window=" in alike(work)


def until(world: World, folder: Path, end: int) -> tuple[list[int], Array]:
    """Train up to a step or to the end, and save; return the samples used and the model."""
    model, used = Quadratic(), list[int]()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    replica = offbeat.replicate(
        model, offbeat.local_sgd(every=6), mesh=world, weighted=True, optimizer=optimizer
    )
    sampler = ElasticSampler(200, 4, replica, window=WINDOW)
    parts = {"replica": replica, "optimizer": optimizer}
    try:
        offbeat.load_per_rank(folder, missing_ok=True, **parts)
        for batch in sampler:
            replica.set_weight(len(batch))
            error = loss(model, world.rank, replica.steps)
            replica.report_loss(error)
            error.backward()
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
            used += batch
            if replica.steps >= end:
                break
        offbeat.save_per_rank(folder, **parts)
    finally:
        replica.detach()
    return used, flat(snapshot(model))


def test_a_save_in_the_middle_of_a_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From step 12 on rank 1 rests in each second step: both make 14, and only rank 0 makes 15."""
    monkeypatch.setattr("offbeat.data.sampler.repaced", lambda *_: [6, 3])

    def both(name: str, end: int) -> list[tuple[list[int], Array]]:
        return ThreadWorld(2).run(lambda world: until(world, tmp_path / name, end))

    with monkeypatch.context() as patch:
        patch.setenv("OFFBEAT_TELEMETRY", str(tmp_path))
        whole = both("whole", 99)
    assert sorted(whole[0][0] + whole[1][0]) == [*range(200)]
    recorded = [[step.weight for step in each.steps] for each in read_run(tmp_path)]
    assert [sum(weights) for weights in recorded] == [len(used) for used, _ in whole]
    assert len(recorded[0]) == len(recorded[1]), "a rest is a step of weight 0"
    said = alike(lambda world: until(world, tmp_path / "apart", 15), 2)
    assert "after different numbers of steps: [15, 16]" in said
    first, second = both("parts", 14), both("parts", 99)
    for (used, end), (before, _), (after, resumed) in zip(whole, first, second, strict=True):
        assert used == before + after
        assert (end == resumed).all()
