"""Kernels of :class:`AsyncAdam`: one gradient applied to shared memory, coordinate by coordinate.

Loads and stores are plain. Two workers at one coordinate may both read the old value, and then
one of the two updates is lost; a value itself is never torn, since aligned 4 and 8 bytes are
written at once. Nothing is written where g = 0: writing an old value back there would undo what
another worker wrote in between.
"""

from typing import Any

import numpy as np

from offbeat.functional.compiled import compiled, inlined
from offbeat.hogwild.prefetch import prefetch

Array = Any  # numba specializes on the dtype at the first call
LINE = 64  # bytes that memory delivers at a time
AHEAD = np.uint64(4)  # rows


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


@compiled
def sum_rows(rows: Array, values: Array, place: Array, unique: Array, sums: Array) -> int:
    """Add up the values of equal rows: how many rows there are, in ``unique`` and ``sums``.

    ``place`` maps a row of the parameter to its line of ``sums``; it is all -1 before and after.
    """
    count = 0
    for i in range(rows.shape[0]):
        k = place[rows[i]]
        if k < 0:
            place[rows[i]] = count
            unique[count] = rows[i]
            for j in range(values.shape[1]):
                sums[count, j] = values[i, j]
            count += 1
        else:
            for j in range(values.shape[1]):
                sums[k, j] += values[i, j]
    for i in range(count):
        place[unique[i]] = -1
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
    theta: Array, m: Array, v: Array, unique: Array, sums: Array, count: int, constants: Array
) -> None:
    """The masked update of the rows of a sparse gradient; ``theta``, ``m``, ``v`` are flat.

    Rows lie anywhere in memory: those a little ahead are on their way while one is updated.
    """
    width, flat = np.uint64(sums.shape[1]), sums.reshape(-1)
    for k in range(np.uint64(count)):
        if k + AHEAD < np.uint64(count):
            fetch(theta, m, v, np.uint64(unique[k + AHEAD]) * width, width)
        at = np.uint64(unique[k]) * width
        update(theta, m, v, at, flat, k * width, width, constants)
