"""Positions of ranks and steps, against a reference that walks through lists."""

import itertools
import random
from typing import Any

import numpy as np
import pytest

from offbeat.data import Change, Layout, Plan, Start
from offbeat.data.intervals import Intervals
from offbeat.data.permutation import epoch_key, permute
from reference.elastic_sampler import Pass, walk

HISTORIES = 200


def positions(intervals: Intervals) -> list[int]:
    return [position for low, high in intervals for position in range(low, high)]


def history(draw: random.Random) -> tuple[Layout, Start, list[Change]]:
    """A random layout, start and list of changes."""
    window = draw.choice((0, 4, 9))
    given = draw.randint(1, 4), draw.randint(1, 3), draw.random() < 0.3, draw.randint(0, 6)
    layout = Layout(*given, window)
    ranks = list(range(draw.randint(1, 5)))
    changes, living, step, newest = [], set(ranks), 0, len(ranks)
    is_calm = draw.random() < 0.3  # nobody is lost or joins
    for _ in range(draw.randint(0, 6)):
        step += draw.randint(1, 5)
        losable = sorted(living)[1:] if not is_calm else []
        lost = {r: max(0, step - draw.randint(-1, 6)) for r in losable if draw.random() < 0.3}
        new = range(newest, newest + (0 if is_calm else draw.choice([0, 0, 1, 2])))
        newest += len(new)
        most = window or 6
        sizes = {r: draw.randint(-(-most // 8), most) for r in living if draw.random() < 0.3}
        if window and sizes:
            sizes = {r: sizes.get(r, most) for r in living} | {draw.choice([*living]): most}
        living = (living - set(lost)) | set(new)
        changes.append(Change(step, lost, dict.fromkeys(new, step + 1), sizes))
    length = draw.randint(len(ranks) * 3, 400)
    middle = draw.randint(1, length - 1)
    return layout, Start(0, tuple(ranks), ((middle, length), (0, middle))), changes


def reference(layout: Layout, start: Start, changes: list[Change]) -> Pass:
    ahead = -(-layout.prefetch // layout.accumulate)
    return walk(
        positions(start.left),
        start.ranks,
        changes,
        batch=layout.batch_size,
        accumulate=layout.accumulate,
        drop_last=layout.drop_last,
        lookahead=max(1, 8 * ahead) if layout.window else ahead,
        window=layout.window,
    )


@pytest.mark.parametrize("part", range(4))
def test_batches_are_those_of_the_reference(part: int, draws: random.Random) -> None:
    early = repeated = resized = rested = 0
    for _ in range(HISTORIES // 4):
        layout, start, changes = history(draws)
        plan, want = Plan(layout, start, changes), reference(layout, start, changes)
        ranks = {*start.ranks, *(rank for change in changes for rank in change.joined)}
        for step, rank in itertools.product(range(want.end + 3), ranks):
            found = plan.batches(step, rank)
            rows = want.given.get((step, rank), [])
            assert [positions(batch.positions) for batch in found] == rows
            marks = [(step, rank, number) in want.repeated for number in range(len(found))]
            assert [batch.is_repeated for batch in found] == marks
        again = [len(want.given[step, rank][number]) for step, rank, number in want.repeated]
        assert plan.repeated(want.end) == sum(again)
        early, repeated = early + any(change.joined for change in changes), repeated + bool(again)
        resized += any(change.sizes for change in changes)
        steps = {sum((s, r) in want.given for s in range(want.end)) for r in start.ranks}
        is_calm = not any(change.lost or change.joined for change in changes)
        rested += is_calm and len(steps) > 1
    assert rested > 0, "some ranks make fewer steps"
    assert resized > 5, "some ranks get sizes of their own"
    assert early > 5, "some ranks join"
    assert repeated > 0, "some samples are repeated"


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_every_size_is_divided_among_all_batches(drop_last: bool, accumulate: int) -> None:
    """All ranks make the same steps with batches of 1 to b samples, each once."""
    cases = [(1,), (2,), (3,), (1, 1), (2, 2), (3, 3), (1, 3), (2, 1), (3, 3, 3, 3, 3), (1, 5, 2)]
    for length, each in itertools.product(range(1, 60), cases):
        ranks, layout = len(each), Layout(2, accumulate, drop_last)
        plan = Plan(layout, Start(7, tuple(range(ranks)), ((0, length),), each), [])
        steps = range(7, plan.end)
        rows = [(plan.batches(step, rank), n) for step in steps for rank, n in enumerate(each)]
        batches = [batch for row, _ in rows for batch in row]
        assert len(batches) == len(steps) * ranks * accumulate
        for row, n in rows:
            sizes = {len(positions(batch.positions)) for batch in row}
            assert sizes <= ({n} if drop_last else {*range(1, n + 1)})
        own = [p for batch in batches if not batch.is_repeated for p in positions(batch.positions)]
        full = sum(each) * accumulate
        assert sorted(own) == list(range(length - length % full if drop_last else length))
        copies = [batch for batch in batches if batch.is_repeated]
        assert not copies or sum(each) < 2 * ranks or length < ranks * accumulate
        assert len(copies) < ranks * accumulate
        assert not any(plan.batches(plan.end, rank) for rank in range(ranks))


def test_a_pass_that_has_ended_stays_so() -> None:
    """Some ranks may have drawn its end before they heard of a change that begins later."""
    changes = [Change(3, lost={1: 2}), Change(4, joined={2: 5})]
    plan = Plan(Layout(2, prefetch=4), Start(0, (0, 1), ((0, 16),)), changes)
    assert plan.end == 4
    assert not any(plan.batches(step, rank) for step in range(4, 20) for rank in range(3))
    start, returned = Plan(plan.latest.layout, Start(0, (0, 1), ((0, 16),)), changes[:1]).ended(4)
    assert start == Start(4, (0,), ((10, 12), (14, 16))), "for the next pass"
    assert returned == 4


@pytest.mark.parametrize("length", [1, 2, 3, 7, 64, 65, 1000, 4097])
def test_the_permutation_is_one(length: int) -> None:
    for seed in range(20):
        found = permute(np.arange(length), length, epoch_key(seed, epoch=3))
        assert sorted(found.tolist()) == list(range(length))


@pytest.mark.parametrize("length", [2**31, 2**31 + 1, 2**40 - 1, 2**62])
def test_large_permutations_are_computed_and_not_held(length: int, draws: random.Random) -> None:
    key = epoch_key(1, 2)
    some = {draws.randrange(length) for _ in range(50_000)} | {0, length - 1}
    low = draws.randrange(length - 50_000)
    some |= set(range(low, low + 50_000))
    found = permute(np.array(sorted(some)), length, key)
    assert len(set(found.tolist())) == len(some)
    assert found.min() >= 0
    assert found.max() < length
    # Halves of the range are hit alike: 5 standard deviations of a fair coin.
    assert abs((found < length // 2).mean() - 0.5) < 2.5 / len(some) ** 0.5
    alone = [int(permute(np.array([p]), length, key)[0]) for p in sorted(some)[:50]]
    assert alone == found[:50].tolist()


@pytest.mark.parametrize("length", [5, 8, 24])
def test_shuffling_is_uniform(length: int) -> None:
    """Chi-squared of where each position goes, and of which sample follows which."""
    seeds = 200 * length
    rows = [permute(np.arange(length), length, epoch_key(seed, 0)) for seed in range(seeds)]
    table = np.stack(rows)
    for place in (0, 1, length // 2, length - 1):
        seen = np.bincount(table[:, place], minlength=length)
        assert chi_squared(seen, seeds / length) < 6
    steps = np.bincount((table[:, 1] - table[:, 0]) % length, minlength=length)
    assert steps[0] == 0
    assert chi_squared(steps[1:], seeds / (length - 1)) < 6


def chi_squared(seen: Any, expected: float) -> float:
    """Standard deviations above what fair draws give."""
    degrees = len(seen) - 1
    return (((seen - expected) ** 2).sum() / expected - degrees) / (2 * degrees) ** 0.5


def test_the_order_is_the_same_everywhere() -> None:
    """Runs resume on other machines: a change of these numbers would change their samples."""
    found = permute(np.arange(3), 1_281_167, epoch_key(0, 0)).tolist()
    assert found == [699054, 1100166, 56081]
