"""Kernels of logistic regression with asynchronous Adam: one call is many updates of one thread.

All loads and stores of theta, m and v are plain; threads run the same kernel on the same memory.
Everything else that a thread writes is its own: gradient buffer, order of rows, random state.
"""

from math import exp, log, sqrt
from typing import Any, NamedTuple

import numpy as np

from offbeat.functional.compiled import compiled
from offbeat.hogwild.prefetch import prefetch

Array = Any  # numba specializes on dtype and layout at the first call
STRIDE = 16  # indices in a cache line; values may take two, and the second follows the first


class Data(NamedTuple):
    """Rows in CSR form: ``indices`` unsigned (no wrap-around to test for), ``y`` per row."""

    indptr: Array
    indices: Array
    data: Array
    y: Array  # 0.0 or 1.0 in binary problems, the number of the class otherwise


class Memory(NamedTuple):
    """What one thread sees: theta, m and v by feature and class, the l2 factor by feature.

    The last row is the intercept's.
    """

    theta: Array
    m: Array
    v: Array
    decay: Array


class Thread(NamedTuple):
    """What belongs to one thread: rows by hand, [place, steps, hand], and its random state."""

    hands: Array
    counts: Array
    random: Array


class Settings(NamedTuple):
    """Numbers of the method; ``betas`` are b1, 1 - b1, b2, 1 - b2 and eps in theta's dtype."""

    alpha: float
    b1: float
    b2: float
    betas: Array
    batch: int
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
def choose(thread: Thread, rows: Array) -> None:
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


@compiled
def prepare(x: Data, thread: Thread, rows: Array) -> None:
    """Choose the next batch and begin to load it, while the last one's update is computed.

    Its rows lie anywhere. With a few megabytes of them, waiting for memory would take as long as
    computing, and longer where other programs use the same cache.
    """
    choose(thread, rows)
    for row in rows:
        for q in range(x.indptr[row], x.indptr[row + 1], STRIDE):
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


@compiled
def adam(theta: Array, m: Array, v: Array, at: Any, g: Any, alpha: Any, betas: Array) -> None:
    """One coordinate's update; a concurrent one of the same coordinate may be lost."""
    first = betas[0] * m[at] + betas[1] * g
    second = betas[2] * v[at] + betas[3] * g * g
    m[at] = first
    v[at] = second
    theta[at] -= alpha * first / (np.sqrt(second) + betas[4])


@compiled
def binary_errors(x: Data, theta: Array, rows: Array, bias: bool, errors: Array) -> float:
    """Probability - y of each row, over the size of the batch. Returns the summed loss.

    Logits of all rows come first: then a row need not wait until what another core wrote for the
    row before it has arrived.
    """
    real = theta.dtype.type
    zero, one, share = real(0), real(1), real(1.0 / rows.shape[0])
    for b in range(rows.shape[0]):
        z = theta[theta.shape[0] - 1] if bias else zero
        for q in range(x.indptr[rows[b]], x.indptr[rows[b] + 1]):
            z += x.data[q] * theta[x.indices[q]]
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
) -> int:
    """Add the batch's gradient to ``g``, all zero before. Returns how many coordinates it touched.

    A coordinate whose sum is zero is noted again when it is met again: :func:`binary` zeroes
    ``g`` at its first place and passes over the second.
    """
    zero, count = g.dtype.type(0), 0
    for b in range(rows.shape[0]):
        e = errors[b]
        for q in range(x.indptr[rows[b]], x.indptr[rows[b] + 1]):
            j = x.indices[q]
            before = g[j]
            touched[count] = j  # counts only if this is the first time: no branch to mispredict
            count += before == zero
            g[j] = before + e * x.data[q]
        if bias:
            g[g.shape[0] - 1] += e
    return count


@compiled
def binary(
    x: Data, memory: Memory, thread: Thread, settings: Settings, updates: int, losses: Array
) -> None:
    """``updates`` updates for each entry of ``losses``, which receives their summed loss.

    The batch that was prepared last is not used: the next call begins a pass anew.
    """
    theta, m, v, decay = memory.theta, memory.m, memory.v, memory.decay
    g = np.zeros(theta.shape[0], theta.dtype)
    errors = np.empty(settings.batch, theta.dtype)
    rows = np.empty(settings.batch, np.uint32)
    longest = 0
    for row in range(x.indptr.shape[0] - 1):
        longest = max(longest, x.indptr[row + 1] - x.indptr[row])
    # A coordinate may be noted more than once, where a sum was zero in between.
    touched = np.empty(settings.batch * longest + 2, np.uint32)
    zero = theta.dtype.type(0)
    prepare(x, thread, rows)
    for p in range(losses.shape[0]):
        for _ in range(updates):
            alpha = theta.dtype.type(step_size(thread, settings))
            losses[p] += binary_errors(x, theta, rows, settings.intercept, errors)
            count = binary_gradient(x, rows, settings.intercept, errors, g, touched)
            prepare(x, thread, rows)
            if settings.intercept:
                touched[count] = theta.shape[0] - 1
                count += 1
            for i in range(count):
                j = touched[i]
                gradient = g[j]
                g[j] = zero
                if gradient != zero:
                    adam(theta, m, v, j, gradient + decay[j] * theta[j], alpha, settings.betas)


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
    x: Data, theta: Array, rows: Array, bias: bool, g: Array, seen: Array, touched: Array
) -> tuple[int, float]:
    """The loss too, for several classes; ``seen`` marks the touched features."""
    last, classes = theta.shape[0] - 1, theta.shape[1]
    share = theta.dtype.type(1.0 / rows.shape[0])
    z = np.empty(classes, theta.dtype)
    count, loss = 0, 0.0
    for row in rows:
        low, high = x.indptr[row], x.indptr[row + 1]
        for k in range(classes):
            z[k] = theta[last, k] if bias else theta.dtype.type(0)
        for q in range(low, high):
            j = x.indices[q]
            for k in range(classes):
                z[k] += x.data[q] * theta[j, k]
        right = z[x.y[row]]
        loss += softmax(z) - right
        z[x.y[row]] -= theta.dtype.type(1)
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


@compiled
def multinomial(
    x: Data, memory: Memory, thread: Thread, settings: Settings, updates: int, losses: Array
) -> None:
    """As :func:`binary`, for several classes."""
    theta, m, v, decay = memory.theta, memory.m, memory.v, memory.decay
    g = np.zeros(theta.shape, theta.dtype)
    rows = np.empty(settings.batch, np.uint32)
    seen = np.zeros(theta.shape[0], np.bool_)
    touched = np.empty(theta.shape[0] + 1, np.uint32)
    zero = theta.dtype.type(0)
    prepare(x, thread, rows)
    for p in range(losses.shape[0]):
        for _ in range(updates):
            alpha = theta.dtype.type(step_size(thread, settings))
            count, loss = multinomial_gradient(x, theta, rows, settings.intercept, g, seen, touched)
            prepare(x, thread, rows)
            losses[p] += loss
            if settings.intercept:
                touched[count] = theta.shape[0] - 1
                count += 1
            for i in range(count):
                j = touched[i]
                seen[j] = False
                for k in range(theta.shape[1]):
                    gradient = g[j, k]
                    g[j, k] = zero
                    if gradient != zero:
                        at = (j, k)
                        gradient += decay[j] * theta[j, k]
                        adam(theta, m, v, at, gradient, alpha, settings.betas)
