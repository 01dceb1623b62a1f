"""Kernels of :class:`AsyncAdam`: one gradient applied to shared memory, coordinate by coordinate.

Loads and stores are plain. Two workers at one coordinate may both read the old value, and then
one of the two updates is lost; a value itself is never torn, since aligned 4 and 8 bytes are
written at once. Nothing is written where g = 0: writing an old value back there would undo what
another worker wrote in between.
"""

from typing import Any

import numpy as np

from offbeat.kernels.compile import Array, compiled, inlined
from offbeat.kernels.prefetch import prefetch

LINE = 64  # bytes that memory delivers at a time
AHEAD = 4  # rows
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio


@compiled
def is_finite(g: Array) -> bool:
    """Whether no element is infinite or NaN: their product with zero is not zero."""
    total = g.dtype.type(0)
    for i in range(g.shape[0]):
        total += abs(g[i] * g.dtype.type(0))
    return bool(total == g.dtype.type(0))


@inlined
def adam(theta: Array, m: Array, v: Array, g: Array, i: int, numbers: Any) -> None:
    """The update of coordinate ``i``."""
    alpha, b1, c1, b2, c2, eps, keep = numbers
    first = b1 * m[i] + c1 * g[i]
    second = b2 * v[i] + c2 * g[i] * g[i]
    m[i] = first
    v[i] = second
    theta[i] = keep * theta[i] - alpha * first / (np.sqrt(second) + eps)


@inlined
def update(
    theta: Array, m: Array, v: Array, at: int, g: Array, low: int, size: int, constants: Array
) -> None:
    """The masked update of ``theta[at:at + size]`` by ``g[low:low + size]``.

    ``constants``: alpha_t, beta1, 1 - beta1, beta2, 1 - beta2, eps, 1 - decay. The loop becomes
    vector instructions that store under a mask. It would not if an index could be negative, which
    counts from the end: hence places are unsigned. And slices are made here, since the references
    to a slice that is passed are counted, atomically.
    """
    alpha, b1, c1, b2 = constants[0], constants[1], constants[2], constants[3]
    numbers = (alpha, b1, c1, b2, constants[4], constants[5], constants[6])
    x = theta[at : at + size]
    first = m[at : at + size]
    second = v[at : at + size]
    values = g[low : low + size]
    zero = g.dtype.type(0)
    for i in range(size):
        if values[i] != zero:
            adam(x, first, second, values, i, numbers)


@compiled
def update_dense(theta: Array, m: Array, v: Array, g: Array, constants: Array) -> None:
    """The masked update of all coordinates."""
    start, size = np.uint64(0), np.uint64(g.shape[0])
    update(theta, m, v, start, g, start, size, constants)


@inlined
def link(rows: Array, heads: Array, following: Array) -> int:
    """Chain the places of equal rows; returns how many chains, whose first places ``heads`` holds.

    ``following[i]`` is the next place with the row of place i, or -1. Rows met are looked up by
    multiplicative hashing with open addressing (Knuth, volume 3, 6.4), in a table that stays in
    the cache, as one over all rows of a large embedding would not.
    """
    size = 4
    while size < 4 * rows.shape[0]:
        size *= 2
    table = np.full(size, -1, np.int32)
    tails = np.empty(rows.shape[0], np.int32)  # of the chain that begins here
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
    """Begin to load ``size`` coordinates of each, line by line."""
    for i in range(at, at + size, np.uint64(LINE // theta.itemsize)):
        prefetch(theta, i)
        prefetch(m, i)
        prefetch(v, i)


@compiled
def update_rows(
    theta: Array, m: Array, v: Array, rows: Array, values: Array, width: int, constants: Array
) -> None:
    """The masked update of the rows of a sparse gradient; all but ``rows`` are flat.

    Values of equal rows are added up first. Rows lie anywhere in memory: those a little ahead are
    on their way while one is updated.
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
            update(theta, m, v, at, values, np.uint64(i) * size, size, constants)
            continue
        total[:] = values[i * width : (i + 1) * width]
        while following[i] >= 0:
            i = following[i]
            total += values[i * width : (i + 1) * width]
        update(theta, m, v, at, total, np.uint64(0), size, constants)
