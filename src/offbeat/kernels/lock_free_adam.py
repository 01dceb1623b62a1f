"""Kernels of :class:`AsyncAdam`: a gradient is applied to shared memory, coordinate by coordinate.

Loads and stores are plain. Two workers at one coordinate may both read the old value, and then
one of the two updates is lost; a value is never torn, since aligned 4 and 8 bytes are written at
once. Where g = 0 nothing is written: a write of the old value would undo an update that another
worker made in between.
"""

from typing import Any

import numpy as np

from offbeat.kernels.compile import Array, compiled, inlined
from offbeat.kernels.prefetch import prefetch

# None, or the number of updates of every coordinate and the factors of the step by that number;
# numba compiles each of the two cases on its own.
Counted = Any
MOST = np.int32(2**31 - 1)
LINE = 64  # bytes of a cache line
AHEAD = 4  # rows
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio


@compiled
def is_finite(g: Array) -> bool:
    """Return whether all elements are finite. The product of zero and infinity or NaN is NaN."""
    total = g.dtype.type(0)
    for i in range(g.shape[0]):
        total += abs(g[i] * g.dtype.type(0))
    return bool(total == g.dtype.type(0))


@inlined
def correction(counts: Array, factors: Array, i: int) -> Any:
    """Count an update of coordinate ``i``; return the factor of its step.

    The count stays at the largest int32, long after the last factor.
    """
    before = counts[i]
    counts[i] = before + np.int32(before < MOST)
    return factors[min(before, factors.shape[0] - 1)]


@inlined
def adam(theta: Array, m: Array, v: Array, g: Array, i: int, alpha: Any, numbers: Any) -> None:
    """Apply Adam's update with step size ``alpha`` to coordinate ``i``."""
    b1, c1, b2, root, eps, keep = numbers
    first = b1 * m[i] + c1 * g[i]
    scaled = root * g[i]  # before it is squared: g * g overflows earlier
    second = b2 * v[i] + scaled * scaled
    m[i] = first
    v[i] = second
    theta[i] = keep * theta[i] - alpha * first / (np.sqrt(second) + eps)


@inlined
def update(
    theta: Array,
    m: Array,
    v: Array,
    at: int,
    g: Array,
    low: int,
    size: int,
    constants: Array,
    counted: Counted,
) -> None:
    """Update ``theta[at:at + size]`` by ``g[low:low + size]`` where the gradient is not zero.

    ``constants``: alpha_t, beta1, 1 - beta1, beta2, the root of 1 - beta2, eps, 1 - decay; where
    coordinates are counted, alpha instead of alpha_t. The loop compiles to vector instructions with
    masked stores, provided that indices are unsigned: a negative index counts from the end. Slices
    are made here, since numba counts references to a slice that is passed, atomically.
    """
    alpha, b1, c1, b2 = constants[0], constants[1], constants[2], constants[3]
    numbers = (b1, c1, b2, constants[4], constants[5], constants[6])
    x = theta[at : at + size]
    first = m[at : at + size]
    second = v[at : at + size]
    values = g[low : low + size]
    zero = g.dtype.type(0)
    if counted is None:
        for i in range(size):
            if values[i] != zero:
                adam(x, first, second, values, i, alpha, numbers)
    else:
        counts, factors = counted[0][at : at + size], counted[1]
        for i in range(size):
            if values[i] != zero:
                step = alpha * correction(counts, factors, i)
                adam(x, first, second, values, i, step, numbers)


@compiled
def update_dense(
    theta: Array, m: Array, v: Array, g: Array, constants: Array, counted: Counted
) -> None:
    """Update all coordinates whose gradient is not zero; all arrays are (d,)."""
    start, size = np.uint64(0), np.uint64(g.shape[0])
    update(theta, m, v, start, g, start, size, constants, counted)


@inlined
def link(rows: Array, heads: Array, following: Array) -> int:
    """Link the positions of equal rows; return the number of chains, whose heads are in ``heads``.

    ``following[i]`` is the next position with the row of position i, or -1. Rows are looked up by
    multiplicative hashing with open addressing (Knuth, volume 3, 6.4). The table fits the cache; a
    table of all rows of a large embedding would not.
    """
    size = 4
    while size < 4 * rows.shape[0]:
        size *= 2
    table = np.full(size, -1, np.int32)
    tails = np.empty(rows.shape[0], np.int32)  # last position of the chain with this head
    count = 0
    for i in range(rows.shape[0]):
        slot = np.int64(np.uint64(rows[i]) * GOLDEN >> np.uint64(32)) & (size - 1)
        while table[slot] >= 0 and rows[table[slot]] != rows[i]:
            slot = (slot + 1) & (size - 1)
        head = table[slot]
        following[i] = -1
        if head < 0:
            table[slot] = head = heads[count] = i
            count += 1
        else:
            following[tails[head]] = i
        tails[head] = i
    return count


@inlined
def fetch(theta: Array, m: Array, v: Array, at: int, size: int) -> None:
    """Prefetch ``size`` coordinates of each array, line by line."""
    for i in range(at, at + size, np.uint64(LINE // theta.itemsize)):
        prefetch(theta, i)
        prefetch(m, i)
        prefetch(v, i)


@compiled
def update_rows(
    theta: Array,
    m: Array,
    v: Array,
    rows: Array,
    values: Array,
    width: int,
    constants: Array,
    counted: Counted,
) -> None:
    """Update the rows of a sparse gradient where it is not zero.

    ``theta``, ``m`` and ``v`` are flat, ``rows`` (n,), ``values`` (n * width,). Values of equal
    rows are added first. Access to rows is random, so that the rows of later updates are
    prefetched.
    """
    size = np.uint64(width)
    heads = np.empty(rows.shape[0], np.int32)
    following = np.empty(rows.shape[0], np.int32)
    total = np.empty(width, values.dtype)
    count = link(rows, heads, following)
    for k in range(count):
        if k + AHEAD < count:
            fetch(theta, m, v, np.uint64(rows[heads[k + AHEAD]]) * size, size)
        i = heads[k]
        at = np.uint64(rows[i]) * size
        if following[i] < 0:
            update(theta, m, v, at, values, np.uint64(i) * size, size, constants, counted)
            continue
        total[:] = values[i * width : (i + 1) * width]
        while following[i] >= 0:
            i = following[i]
            total += values[i * width : (i + 1) * width]
        update(theta, m, v, at, total, np.uint64(0), size, constants, counted)
