"""Sizes of batches with which ranks of different speeds take the same time."""

import heapq
import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, final

from offbeat.data.generation import SLOWEST

WORTH = 0.02  # of the time of a step: smaller gains are noise
FEWEST = 3  # steps from which a speed is known


def balanced_sizes(
    seconds: Sequence[float],
    *,
    total: int | None = None,
    most: int | None = None,
    fixed: Sequence[float] = (),
) -> list[int]:
    r"""Return the sizes of batches with which the slowest rank takes the least time.

    .. math:: \min_n \max_i (f_i + s_i n_i), \quad \sum_i n_i = total, \quad 1 \le n_i \le most

    A pure function of its arguments: ranks that pass the same ones get the same sizes.

    Args:
        seconds: s, the time of each rank for one sample.
        total: the sum of the sizes. None: the fastest rank takes ``most``, and each other one as
            many as it computes in the same time.
        most: the largest size, such as what fits into memory. None: ``total``.
        fixed: f, the time of each rank for a step apart from its samples; () for 0.

    Raises ``ValueError`` for times that are not above 0 (f: 0 or more), or sizes that do not exist.

    >>> balanced_sizes([0.01, 0.01, 0.02], total=50)
    [20, 20, 10]
    >>> balanced_sizes([0.01, 0.02, 0.02], most=24, fixed=[0.0, 0.04, 0.0])
    [24, 10, 12]
    """
    fixed = fixed or [0.0] * len(seconds)
    _check(seconds, fixed, total, most)
    cap = total if most is None else most
    assert cap is not None, "one of them is given"

    def within(limit: float) -> list[int]:
        counts = [(limit - f) / s for f, s in zip(fixed, seconds, strict=True)]
        return [max(1, min(cap, math.floor(count + 1e-9))) for count in counts]

    if total is None:
        return within(min(f + s * cap for f, s in zip(fixed, seconds, strict=True)))
    low, high = 0.0, max(fixed) + max(seconds) * total
    for _ in range(64):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(within(middle)) <= total else (low, middle)
    sizes = within(low)
    ends = [(fixed[i] + seconds[i] * (n + 1), i) for i, n in enumerate(sizes) if n < cap]
    heapq.heapify(ends)
    for _ in range(total - sum(sizes)):  # one for each tie
        end, i = heapq.heappop(ends)
        sizes[i] += 1
        if sizes[i] < cap:
            heapq.heappush(ends, (end + seconds[i], i))
    return sizes


def _check(
    seconds: Sequence[float], fixed: Sequence[float], total: int | None, most: int | None
) -> None:
    ranks = len(seconds)
    if not ranks or not all(0 < s < math.inf for s in seconds):
        raise ValueError(f"seconds={[*seconds]}, expected a time above 0 for each rank")
    if len(fixed) != ranks or not all(0 <= f < math.inf for f in fixed):
        raise ValueError(f"fixed={[*fixed]}, expected 0 or more for each of {ranks} ranks")
    if total is None and most is None:
        raise ValueError("total and most are None; pass the sum of the sizes, or the largest one")
    if most is not None and most < 1:
        raise ValueError(f"most={most}, expected 1 or more")
    if total is not None and not ranks <= total <= ranks * (most or total):
        raise ValueError(
            f"total={total} with most={most}, expected {ranks} or more for {ranks} ranks, and at "
            "most that times the largest size"
        )


@final
class Pace:
    """The times of this rank for one sample, of its steps since it was asked last."""

    def __init__(self) -> None:
        """Begin without any."""
        self._seconds: list[float] = []
        self._step = -1

    def note(self, step: int, samples: int, last: Mapping[str, Any]) -> None:
        """Note what ``replica.stats()["last"]`` says of a step, once; its waits do not count."""
        if step > self._step and samples and last:
            self._step = step
            self._seconds.append((last["seconds"] - last["seconds_stalled"]) / samples)

    def take(self) -> float:
        """Return the median, and begin anew; 0 while there are too few."""
        if len(self._seconds) < FEWEST:
            return 0.0
        found = median(self._seconds)
        self._seconds.clear()
        return found


def rebalanced(
    now: Sequence[int], seconds: Sequence[float], total: int, most: int
) -> list[int] | None:
    """Return other sizes than those ``now`` if a step gains by it; a time of 0 is not known."""
    if min(seconds) <= 0:
        return None
    sizes = balanced_sizes(seconds, total=total, most=most)
    before, after = (
        max(s * n for s, n in zip(seconds, each, strict=True)) for each in (now, sizes)
    )
    return sizes if after < (1 - WORTH) * before or sum(now) != total else None


def repaced(now: Sequence[int], seconds: Sequence[float], window: int) -> list[int] | None:
    r"""Return other steps of a window than those ``now`` if all make more by it in the same time.

    .. math:: \max_m \sum_i m_i \Big/ \max_i s_i m_i, \quad \max_i m_i = window

    for m at which no other rank ends before the slowest one by a step. A time of 0 is not known.

    >>> repaced([8, 8, 8], [0.01, 0.0202, 0.03], 8)
    [8, 4, 2]
    """
    if min(seconds) <= 0:
        return None
    least = -(-window // SLOWEST)
    shortest = window * min(seconds)

    def within(limit: float) -> list[int]:
        return [max(least, min(window, math.floor(limit / s + 1e-9))) for s in seconds]

    def speed(steps: Sequence[int]) -> float:
        return sum(steps) / max(s * m for s, m in zip(seconds, steps, strict=True))

    limits = {shortest, *(s * math.ceil(shortest / s) for s in seconds)}
    best = max(map(within, sorted(limits)), key=speed)
    return best if speed(best) > (1 + WORTH) * speed(now) else None
