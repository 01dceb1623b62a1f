"""Kernels of :class:`AsyncAdam`: one gradient applied to shared memory, coordinate by coordinate.

Loads and stores are plain. Two workers at one coordinate may both read the old value, and then
one of the two updates is lost; a value itself is never torn, since aligned 4 and 8 bytes are
written at once. Nothing is written where g = 0: writing an old value back there would undo what
another worker wrote in between.
"""

from typing import Any

import numpy as np

from offbeat.functional.compiled import compiled
from offbeat.hogwild.prefetch import prefetch

Array = Any  # numba specializes on the dtype at the first call
LINE = 64  # bytes that memory delivers at a time
AHEAD = np.uint64(4)  # rows
BLOCK = np.uint64(
    64
)  # coordinates: wide enough for vector instructions, short enough to have no zero


@compiled
def is_finite(g: Array) -> bool:
    """Whether no element is infinite or NaN: their product with zero is not zero."""
    total = g.dtype.type(0)
    for i in range(g.shape[0]):
        total += abs(g[i] * g.dtype.type(0))
    return bool(total == g.dtype.type(0))


@compiled
def update_all(
    theta: Array, m: Array, v: Array, at: Array, g: Array, low: Array, high: Array, constants: Array
) -> None:
    """The update of coordinates that all have a gradient: many at once, without a branch.

    Places are unsigned, since a negative index would count from the end: that test for each
    element is what keeps a loop from becoming vector instructions.
    """
    alpha, b1, c1, b2 = constants[0], constants[1], constants[2], constants[3]
    c2, eps, keep = constants[4], constants[5], constants[6]
    for i in range(low, high):
        k = at + i
        first = b1 * m[k] + c1 * g[i]
        second = b2 * v[k] + c2 * g[i] * g[i]
        m[k] = first
        v[k] = second
        theta[k] = keep * theta[k] - alpha * first / (np.sqrt(second) + eps)


@compiled
def update(
    theta: Array, m: Array, v: Array, at: Array, g: Array, low: Array, high: Array, constants: Array
) -> None:
    """The masked update of ``theta[at + i]`` by ``g[i]``, for i from ``low`` to before ``high``.

    ``constants``: alpha_t, beta1, 1 - beta1, beta2, 1 - beta2, eps, 1 - decay. Blocks without a
    zero, which is most of them, are updated as a whole; in others single coordinates are.
    """
    one = np.uint64(1)
    for start in range(low, high, BLOCK):
        end = min(start + BLOCK, high)
        zeros = 0
        for i in range(start, end):
            zeros += g[i] == 0
        if zeros == 0:
            update_all(theta, m, v, at, g, start, end, constants)
            continue
        for i in range(start, end):
            if g[i] != 0:
                update_all(theta, m, v, at, g, i, i + one, constants)


@compiled
def update_dense(theta: Array, m: Array, v: Array, g: Array, constants: Array) -> None:
    """The masked update of all coordinates."""
    update(theta, m, v, np.uint64(0), g, np.uint64(0), np.uint64(g.shape[0]), constants)


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


@compiled
def fetch(theta: Array, m: Array, v: Array, at: int, width: int) -> None:
    """Begin to load one row of each, line by line."""
    for i in range(at, at + width, LINE // theta.itemsize):
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
            fetch(theta, m, v, unique[k + AHEAD] * sums.shape[1], sums.shape[1])
        low = k * width
        update(theta, m, v, np.uint64(unique[k]) * width - low, flat, low, low + width, constants)
