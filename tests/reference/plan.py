"""The time of exchanges, message by message and rank by rank, in plain Python.

Every function takes and returns lists of times, one for each rank. ``alpha`` is the latency of a
message and ``rate`` the bytes per second of a link that carries both directions at once.
"""

from collections.abc import Callable, Sequence

Times = list[float]


def ring(starts: Times, chunk: float, turns: int, alpha: float, rate: float) -> Times:
    """Every rank sends a chunk to the next one in every hop, once it has the previous one's.

    In two halves: each is announced by its receiver once that has the same half of the hop before,
    and in the first hop of a turn once it has both. The last rank to come is the slowest of every
    hop.
    """
    n, ends = len(starts), [max(starts)] * len(starts)
    for _ in range(turns):
        free, halves = list(ends), [list(ends), list(ends)]
        for _ in range(n - 1):
            for half, times in enumerate(halves):
                near = [max(times[r], times[r - 1], times[(r + 1) % n]) for r in range(n)]
                leaves = [t + 2 * alpha for t in near]
                free = [max(f, t) + chunk / 2 / rate for f, t in zip(free, leaves, strict=True)]
                halves[half] = list(free)
        ends = [max(both) for both in zip(*halves, strict=True)]
    return ends


def all_reduce(starts: Times, nbytes: float, alpha: float, rate: float) -> Times:
    """A ring that scatters sums and gathers them."""
    return ring(starts, nbytes / len(starts), 2, alpha, rate)


def staged(starts: Times, chunk: float, alpha: float, rate: float) -> Times:
    """An exchange with one rank after the other, at the distances 1, 2, ..., n-1."""
    times, n = list(starts), len(starts)
    for hop in range(1, n):
        times = [
            max(times[r], times[(r - hop) % n], times[(r + hop) % n]) + 2 * alpha + chunk / rate
            for r in range(n)
        ]
    return times


def ddp(
    factors: Sequence[Sequence[float]],
    forward: float,
    buckets: Sequence[tuple[float, float]],
    backward: float,
    optimizer: float,
    alpha: float,
    rate: float,
) -> Times:
    """Buckets of (ready after so many seconds of backward, bytes), two at a time on one link."""
    n = len(factors[0])
    now, lanes, passed = [0.0] * n, [0.0, 0.0], 0.0
    for step in factors:
        begun = [t + forward * f for t, f in zip(now, step, strict=True)]
        for ready, nbytes in buckets:
            filled = [b + ready * f for b, f in zip(begun, step, strict=True)]
            start = max(*filled, min(lanes))
            queued = max(0.0, passed - start)
            passed = start + queued + 2 * (n - 1) * nbytes / n / rate
            alone = all_reduce([start] * n, nbytes, alpha, rate)[0]
            lanes = [max(lanes), max(alone + queued / 2, passed)]
        ended = [max(lanes)] * n
        done = [b + backward * f for b, f in zip(begun, step, strict=True)]
        now = [max(a, b) + optimizer * f for a, b, f in zip(done, ended, step, strict=True)]
    return now


def local_sgd(
    factors: Sequence[Sequence[float]],
    compute: float,
    every: int,
    nbytes: float,
    alpha: float,
    rate: float,
) -> Times:
    """A blocking all-reduce after every ``every`` steps."""
    now = [0.0] * len(factors[0])
    for k, step in enumerate(factors):
        now = [t + compute * f for t, f in zip(now, step, strict=True)]
        if (k + 1) % every == 0:
            now = all_reduce(now, nbytes, alpha, rate)
    return now


def diloco(
    factors: Sequence[Sequence[float]],
    compute: float,
    every: int,
    delay: int,
    nbytes: float,
    alpha: float,
    rate: float,
) -> Times:
    """An all-reduce that is waited for some steps after it was started."""
    now, arrival = [0.0] * len(factors[0]), [0.0] * len(factors[0])
    for k, step in enumerate(factors):
        now = [t + compute * f for t, f in zip(now, step, strict=True)]
        if (k + 1 - delay) % every == 0 and k >= delay:
            now = [max(a, b) for a, b in zip(now, arrival, strict=True)]
        if (k + 1) % every == 0:
            starts = [max(a, b) for a, b in zip(now, arrival, strict=True)]
            arrival = all_reduce(starts, nbytes, alpha, rate)
            if delay == 0:
                now = list(arrival)
    return now


def gossip(
    factors: Sequence[Sequence[float]],
    compute: float,
    targets: Callable[[int, int], Sequence[int]],
    nbytes: float,
    overlap: int,
    alpha: float,
    rate: float,
) -> Times:
    """Messages to ``targets(rank, exchange)``: a rank waits for those it sends to and hears."""
    n = len(factors[0])
    now, arrival, index = [0.0] * n, [0.0] * n, 0
    for k, step in enumerate(factors):
        now = [t + compute * f for t, f in zip(now, step, strict=True)]
        if k % max(1, overlap):
            continue
        sends = [list(targets(r, index)) for r in range(n)]
        if overlap:  # one message in flight at a time
            now = [max(a, b) for a, b in zip(now, arrival, strict=True)]
        arrival = _arrivals(now, sends, nbytes, alpha, rate)
        if not overlap:
            now = list(arrival)
        index += 1
    return now


def _arrivals(
    now: Times, sends: Sequence[Sequence[int]], nbytes: float, alpha: float, rate: float
) -> Times:
    n = len(now)
    heard = [[s for s in range(n) if r in sends[s]] for r in range(n)]
    carried = [max(len(sends[r]), len(heard[r])) * nbytes / rate for r in range(n)]
    nearby = [[r, *sends[r], *heard[r]] for r in range(n)]
    return [
        max(now[j] for j in near) + 2 * alpha + max(carried[j] for j in near) for near in nearby
    ]
