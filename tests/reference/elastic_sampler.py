"""Who is given which positions, with lists: every position of a pass is one of their entries."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

Given = dict[tuple[int, int], list[list[int]]]  # by step and rank, batches


class Pass(NamedTuple):
    """All batches of a pass, those that repeat another's, and the step at which it ends."""

    given: Given
    repeated: set[tuple[int, int, int]]  # step, rank, number of the batch
    end: int


def walk(
    left: Sequence[int],
    ranks: Sequence[int],
    changes: Sequence[tuple[int, Mapping[int, int], Mapping[int, int], Mapping[int, int]]],
    *,
    batch: int,
    accumulate: int = 1,
    drop_last: bool = False,
    lookahead: int = 0,
    window: int = 0,
) -> Pass:
    """Go from step to step, from step 0 on, until nothing is left for one.

    A change has its step, who was lost or has joined, and sizes of batches, by rank; or with a
    window of H steps in how many of these a rank takes part, evenly, and all do in the first one
    after a change.
    """
    left, ranks, given, repeated = list(left), sorted(ranks), Given(), set[tuple[int, int, int]]()
    due = sorted([(step + 1 + lookahead, a, b, c) for step, a, b, c in changes], key=lambda d: d[0])
    own: dict[int, int] = {}

    def change(
        step: int, lost: Mapping[int, int], joined: Mapping[int, int], sizes: Mapping[int, int]
    ) -> None:
        nonlocal ranks
        for rank in sorted(set(joined) - set(ranks)):
            for early in range(joined[rank], step):
                rows = split(left, batch, accumulate, drop_last)
                if rows is None:
                    rows = given[early, leader(given, early)]
                    repeated.update((early, rank, number) for number in range(accumulate))
                given[early, rank] = rows
        usual = window or batch
        own.update(dict.fromkeys(set(joined) - set(ranks), usual) | {**sizes})
        members = ranks
        ranks = sorted({*ranks, *joined})
        left[:0] = [
            position
            for rank in sorted(set(lost) & set(ranks))
            for when in range(lost[rank], step)
            for number, row in enumerate(given.get((when, rank), []))
            if (when, rank, number) not in repeated
            for position in row
        ]
        ranks = [rank for rank in ranks if rank not in lost]
        if window and (ranks != members or max(own.get(rank, window) for rank in ranks) < window):
            own.clear()

    step, changed = 0, True
    while True:
        while due and due[0][0] <= step:
            change(step, *due.pop(0)[1:])
            changed = True
        takes = [
            [r for r in ranks if not window or is_first or turns(own.get(r, window), s, window)]
            for s, is_first in ((step, changed), (step + 1, False))
        ]
        changed, taking = False, takes[0]
        parts, following = (len(each) * accumulate for each in takes)
        size_of = {rank: batch if window else own.get(rank, batch) for rank in ranks}
        wanted = [size_of[rank] for rank in taking for _ in range(accumulate)]
        size = size_of_step(len(left), parts, following, sum(wanted), drop_last)
        if size == 0:
            break
        taken, left[:] = left[:size], left[size:]
        for part in range(parts):
            rank, number = taking[part // accumulate], part % accumulate
            if size < parts:
                row = [taken[part % size]]
                repeated.update({(step, rank, number)} if part >= size else ())
            else:  # one for each, and of the rest in proportion
                edges = [
                    k + (sum(wanted[:k]) - k) * (size - parts) // max(1, sum(wanted) - parts)
                    for k in (part, part + 1)
                ]
                row = taken[edges[0] : edges[1]]
            given.setdefault((step, rank), []).append(row)
        step += 1
    for _, *late in due:  # who joined takes part in the steps until the end
        change(step, *late)
    return Pass(given, repeated, step)


def leader(given: Given, step: int) -> int:
    """The lowest of the ranks that took part in a step as members."""
    return min(rank for when, rank in given if when == step)


def turns(steps: int, step: int, window: int) -> bool:
    """Whether one who takes part in so many steps of each window does in this one."""
    made = [
        sum(1 for k in range(steps) if k * window < where * steps) for where in range(window + 1)
    ]
    return made[step % window + 1] > made[step % window]


def size_of_step(left: int, parts: int, following: int, full: int, drop_last: bool) -> int:
    """How much a step takes: the next one needs one for each batch, if it needs any."""
    if drop_last:
        return full if left >= full else 0
    if full < left < full + following and full >= parts + following:
        return left - following
    return min(left, full)


def split(left: list[int], batch: int, accumulate: int, drop_last: bool) -> list[list[int]] | None:
    """Take the batches of one rank off ``left``; None if too few are left."""
    size = min(len(left), batch * accumulate)
    if size < (batch * accumulate if drop_last else accumulate):
        return None
    taken = [left.pop(0) for _ in range(size)]
    edges = [number * size // accumulate for number in range(accumulate + 1)]
    return [taken[a:b] for a, b in pairwise(edges)]
