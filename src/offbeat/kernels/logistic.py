"""Kernels of logistic regression with asynchronous Adam: one call is many updates of one thread.

All loads and stores of theta, m and v are plain; threads run the same kernel on the same memory.
Everything else that a thread writes is its own: gradient buffer, order of rows, random state.
"""

from math import exp, log, sqrt
from typing import Any, NamedTuple

import numpy as np

from offbeat.kernels.compile import Array, compiled, inlined
from offbeat.kernels.prefetch import claim, prefetch

Place = Any  # unsigned: what could be negative would be tested for it at every access
ONE = np.uint64(1)
STRIDE = np.uint64(16)  # indices in a cache line; values may take two, the second follows the first
AHEAD = np.uint64(16)  # coordinates: about as many lines as a core can wait for at a time


class Data(NamedTuple):
    """Rows in CSR form: ``indices`` unsigned (no wrap-around to test for), ``y`` per row."""

    indptr: Array
    indices: Array
    data: Array
    y: Array  # 0.0 or 1.0 in binary problems, the number of the class otherwise


class Memory(NamedTuple):
    """What one thread sees, flat: a row for each feature and the last for the intercept.

    A row of ``shared`` has theta of each class and then the l2 factor, one of ``own`` m of each
    class and then v. Shared moments are in the rows of theta: ``own`` is then the same memory, from
    the first m on. One address a row is computed where four arrays would need four.
    """

    shared: Array
    own: Array
    width: Place  # numbers from row to row of ``shared``
    stride: Place  # and of ``own``


class Thread(NamedTuple):
    """What belongs to one thread: rows by hand, [place, steps, hand], and its random state."""

    hands: Array
    counts: Array
    random: Array


class Settings(NamedTuple):
    """Numbers of the method; ``betas`` are b1, 1 - b1, b2, 1 - b2 and eps in theta's dtype.

    They are no array: its elements would be loaded anew after every store.
    """

    alpha: float
    b1: float
    b2: float
    betas: tuple[Any, ...]
    batch: int
    columns: int
    workers: int
    private: bool
    intercept: bool


@compiled
def draw(random: Array, bound: int) -> int:
    """A uniform whole number below ``bound`` < 2^31, by xorshift64 (Marsaglia 2003)."""
    x = random[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    random[0] = x
    return int((np.int64(x >> np.uint64(33)) * bound) >> 31)


@compiled
def draw_batch(thread: Thread, rows: Array) -> None:
    """The next batch of a shuffled pass over a hand: one Fisher-Yates swap a row.

    In the next pass the thread takes the next hand, so that it sees all rows also where the
    others get no time to run.
    """
    at, turn, n = thread.counts[0], thread.counts[2], thread.hands.shape[1]
    if at + rows.shape[0] > n:
        at = 0
        turn += 1
    order = thread.hands[turn % thread.hands.shape[0]]
    for b in range(rows.shape[0]):
        k = at + draw(thread.random, n - at)
        row = order[k]
        order[k] = order[at]
        order[at] = row
        rows[b] = row
        at += 1
    thread.counts[0] = at
    thread.counts[2] = turn


@inlined
def row_bounds(x: Data, row: Place) -> tuple[Place, Place]:
    """Where a row begins and ends."""
    at = np.uint64(row)
    return np.uint64(x.indptr[at]), np.uint64(x.indptr[at + ONE])


@compiled
def prepare(x: Data, thread: Thread, rows: Array) -> None:
    """Choose the next batch and begin to load it, while the last one's update is computed.

    Its rows lie anywhere. With a few megabytes of them, waiting for memory would take as long as
    computing, and longer where other programs use the same cache.
    """
    draw_batch(thread, rows)
    for row in rows:
        low, high = row_bounds(x, row)
        for q in range(low, high, STRIDE):
            prefetch(x.indices, q)
            prefetch(x.data, q)


@compiled
def step_size(thread: Thread, settings: Settings) -> float:
    """alpha_t of the next update; t is one's own count, spread over all workers' in Shared."""
    t = thread.counts[1] + 1
    thread.counts[1] = t
    if not settings.private:
        t = (t - 1) * settings.workers + 1 + draw(thread.random, settings.workers)
    return float(settings.alpha * sqrt(1.0 - settings.b2**t) / (1.0 - settings.b1**t))


@inlined
def adam(
    memory: Memory, at: Place, m: Place, v: Place, g: Any, alpha: Any, settings: Settings
) -> None:
    """One coordinate's update; a concurrent one of the same coordinate may be lost.

    theta lies at ``at`` of the shared memory, the moments at ``m`` and ``v`` of the own.
    """
    b1, c1, b2, c2, eps = settings.betas
    first = b1 * memory.own[m] + c1 * g
    second = b2 * memory.own[v] + c2 * g * g
    memory.own[m] = first
    memory.own[v] = second
    memory.shared[at] -= alpha * first / (np.sqrt(second) + eps)


@compiled
def binary_errors(x: Data, memory: Memory, rows: Array, bias: bool, errors: Array) -> float:
    """Probability - y of each row, over the size of the batch. Returns the summed loss.

    Logits of all rows come first: then a row need not wait until what another core wrote for the
    row before it has arrived.
    """
    theta, width, real = memory.shared, memory.width, errors.dtype.type
    zero, one, share = real(0), real(1), real(1.0 / rows.shape[0])
    for b in range(rows.shape[0]):
        z = theta[theta.shape[0] - width] if bias else zero
        low, high = row_bounds(x, rows[b])
        for q in range(low, high):
            z += x.data[q] * theta[x.indices[q] * width]
        errors[b] = z
    loss, product = 0.0, 1.0
    for b in range(rows.shape[0]):
        z, y = errors[b], x.y[rows[b]]
        small = exp(-abs(z))
        likely = one / (one + small)
        loss += max(z, zero) - z * y
        product *= one + small  # one logarithm for many rows
        if product > 1e200:
            loss += log(product)
            product = 1.0
        errors[b] = ((likely if z > zero else one - likely) - y) * share
    return loss + log(product)


@compiled
def binary_gradient(
    x: Data, rows: Array, bias: bool, errors: Array, g: Array, touched: Array
) -> Place:
    """Add the batch's gradient to ``g``, all zero before. Returns how many coordinates it touched.

    A coordinate whose sum is zero is noted again when it is met again: :func:`binary` zeroes
    ``g`` at its first place and passes over the second.
    """
    zero, count = g.dtype.type(0), np.uint64(0)
    for b in range(rows.shape[0]):
        e = errors[b]
        low, high = row_bounds(x, rows[b])
        for q in range(low, high):
            j = x.indices[q]
            before = g[j]
            touched[count] = j  # counts only if this is the first time: no branch to mispredict
            count += np.uint64(before == zero)
            g[j] = before + e * x.data[q]
        if bias:
            g[g.shape[0] - 1] += e
    return count


@inlined
def apply_binary(
    memory: Memory, settings: Settings, touched: Array, count: Place, g: Array, alpha: Any
) -> None:
    """Update the touched coordinates and zero ``g``.

    A line that another core wrote last has arrived with theta, but only to be read. The right to
    write has to come from there too, and stores wait for it one after another: it is asked for
    some coordinates early. Alone a thread has all rights, and would only compute addresses.
    """
    shared, width, stride, zero = memory.shared, memory.width, memory.stride, g.dtype.type(0)
    several = settings.workers > 1
    for i in range(count):
        if several:
            claim(shared, touched[i + AHEAD] * width)
        j = touched[i]
        gradient = g[j]
        g[j] = zero
        if gradient != zero:
            at, m = j * width, j * stride
            gradient += shared[at + ONE] * shared[at]
            adam(memory, at, m, m + ONE, gradient, alpha, settings)


@compiled
def binary(
    x: Data, memory: Memory, thread: Thread, settings: Settings, updates: int, losses: Array
) -> None:
    """``updates`` updates for each entry of ``losses``, which receives their summed loss.

    The batch that was prepared last is not used: the next call begins a pass anew.
    """
    kind = memory.shared.dtype
    features = memory.shared.shape[0] // memory.width
    g = np.zeros(features, kind)
    errors = np.empty(settings.batch, kind)
    rows = np.empty(settings.batch, np.uint32)
    longest = 0
    for row in range(x.indptr.shape[0] - 1):
        longest = max(longest, x.indptr[row + 1] - x.indptr[row])
    # A coordinate may be noted more than once, where a sum was zero in between.
    touched = np.zeros(settings.batch * longest + 2 + AHEAD, np.uint32)
    prepare(x, thread, rows)
    for p in range(losses.shape[0]):
        for _ in range(updates):
            alpha = g.dtype.type(step_size(thread, settings))
            losses[p] += binary_errors(x, memory, rows, settings.intercept, errors)
            count = binary_gradient(x, rows, settings.intercept, errors, g, touched)
            prepare(x, thread, rows)
            if settings.intercept:
                touched[count] = features - 1
                count += ONE
            apply_binary(memory, settings, touched, count, g, alpha)


@compiled
def softmax(z: Array) -> float:
    """Turn logits into probabilities in place; returns log of the sum of exponentials."""
    top = z.max()
    total = z.dtype.type(0)
    for k in range(z.shape[0]):
        z[k] = exp(z[k] - top)
        total += z[k]
    for k in range(z.shape[0]):
        z[k] /= total
    return float(top + log(total))


@compiled
def multinomial_gradient(
    x: Data, memory: Memory, rows: Array, bias: bool, g: Array, seen: Array, touched: Array
) -> tuple[int, float]:
    """The loss too, for several classes; ``seen`` marks the touched features."""
    theta, width, last, classes = memory.shared, memory.width, g.shape[0] - 1, g.shape[1]
    share = g.dtype.type(1.0 / rows.shape[0])
    z = np.empty(classes, g.dtype)
    count, loss = 0, 0.0
    for row in rows:
        low, high = row_bounds(x, row)
        for k in range(classes):
            z[k] = theta[last * width + k] if bias else g.dtype.type(0)
        for q in range(low, high):
            at = x.indices[q] * width
            for k in range(classes):
                z[k] += x.data[q] * theta[at + np.uint64(k)]
        right = z[x.y[row]]
        loss += softmax(z) - right
        z[x.y[row]] -= g.dtype.type(1)
        for q in range(low, high):
            j = x.indices[q]
            if not seen[j]:
                seen[j] = True
                touched[count] = j
                count += 1
            for k in range(classes):
                g[j, k] += share * z[k] * x.data[q]
        if bias:
            for k in range(classes):
                g[last, k] += share * z[k]
    return count, loss


@inlined
def apply_multinomial(memory: Memory, settings: Settings, j: Place, g: Array, alpha: Any) -> None:
    """Update the coordinates of a touched feature and zero its row of ``g``."""
    shared, zero, classes = memory.shared, g.dtype.type(0), np.uint64(g.shape[1])
    at, m = j * memory.width, j * memory.stride
    decay = shared[at + classes]
    for k in range(classes):
        gradient = g[j, k]
        g[j, k] = zero
        if gradient != zero:
            gradient += decay * shared[at + k]
            adam(memory, at + k, m + k, m + classes + k, gradient, alpha, settings)


@compiled
def multinomial(
    x: Data, memory: Memory, thread: Thread, settings: Settings, updates: int, losses: Array
) -> None:
    """As :func:`binary`, for several classes."""
    kind = memory.shared.dtype
    features = memory.shared.shape[0] // memory.width
    g = np.zeros((features, settings.columns), kind)
    rows = np.empty(settings.batch, np.uint32)
    seen = np.zeros(features, np.bool_)
    touched = np.empty(features + 1, np.uint32)
    prepare(x, thread, rows)
    for p in range(losses.shape[0]):
        for _ in range(updates):
            alpha = g.dtype.type(step_size(thread, settings))
            bias = settings.intercept
            count, loss = multinomial_gradient(x, memory, rows, bias, g, seen, touched)
            prepare(x, thread, rows)
            losses[p] += loss
            if bias:
                touched[count] = features - 1
                count += 1
            for j in touched[:count]:
                seen[j] = False
                apply_multinomial(memory, settings, j, g, alpha)
