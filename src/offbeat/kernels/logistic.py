"""Kernels of logistic regression with asynchronous Adam; a call makes many updates of one thread.

All loads and stores of theta, m and v are plain; threads run the same kernel on the same memory.
Everything else that a thread writes is private: gradient buffer, order of rows, random state.
"""

from math import exp, log, sqrt
from typing import Any

import numpy as np

from offbeat.kernels.compile import Array, compiled, inlined
from offbeat.kernels.logistic_memory import Data, Index, Memory, Settings, Thread
from offbeat.kernels.prefetch import claim, prefetch

# None, or the factors of alpha by the number of updates of a coordinate. Not a field of Settings:
# numba compiles the two cases apart, and would count references to an array in a tuple at each use.
Factors = Any
ONE = np.uint64(1)
STRIDE = np.uint64(16)  # indices in a line; of values two, the hardware prefetches the second
AHEAD = np.uint64(16)  # coordinates: about the number of cache misses that a core keeps outstanding


@compiled
def draw(random: Array, bound: int) -> int:
    """Draw a uniform integer below ``bound`` < 2^31, by xorshift64 (Marsaglia 2003)."""
    x = random[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    random[0] = x
    return int((np.int64(x >> np.uint64(33)) * bound) >> 31)


@compiled
def draw_batch(thread: Thread, rows: Array) -> None:
    """Draw the next batch of a shuffled pass over a hand, by one Fisher-Yates swap per row.

    The next pass uses the next hand, so that a thread processes all rows even if the other
    threads are not scheduled.
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
def row_bounds(x: Data, row: Index) -> tuple[Index, Index]:
    """Return the start and the end of a row in ``x.indices``."""
    at = np.uint64(row)
    return np.uint64(x.indptr[at]), np.uint64(x.indptr[at + ONE])


@compiled
def prepare(x: Data, thread: Thread, rows: Array) -> None:
    """Draw the next batch and prefetch it, before the update of the last one.

    Access to rows is random. With a few megabytes of data, waiting for memory would take as long
    as the computation, and longer where other programs use the same cache.
    """
    draw_batch(thread, rows)
    for row in rows:
        low, high = row_bounds(x, row)
        for q in range(low, high, STRIDE):
            prefetch(x.indices, q)
            prefetch(x.data, q)


@compiled
def step_size(thread: Thread, settings: Settings, factors: Factors) -> float:
    """Return alpha_t; t is this thread's count, with shared moments a draw among all workers'.

    With ``factors`` it is alpha, which each coordinate corrects.
    """
    if factors is not None:
        return float(settings.alpha)
    t = thread.counts[1] + 1
    thread.counts[1] = t
    if not settings.private:
        t = (t - 1) * settings.workers + 1 + draw(thread.random, settings.workers)
    return float(settings.alpha * sqrt(1.0 - settings.b2**t) / (1.0 - settings.b1**t))


@inlined
def adam(
    memory: Memory,
    at: Index,
    m: Index,
    classes: Index,
    g: Any,
    alpha: Any,
    settings: Settings,
    factors: Factors,
) -> None:
    """Update one coordinate; a concurrent update of the same coordinate may be lost.

    ``at`` is the index of theta in the shared memory, ``m`` that of m in the own memory; v and the
    number of updates follow at distances of ``classes``.
    """
    b1, c1, b2, c2, eps = settings.betas
    v = m + classes
    if factors is not None:
        before = memory.own[v + classes]
        memory.own[v + classes] = before + memory.own.dtype.type(1)
        alpha = alpha * factors[min(np.uint64(before), np.uint64(factors.shape[0] - 1))]
    first = b1 * memory.own[m] + c1 * g
    second = b2 * memory.own[v] + c2 * g * g
    memory.own[m] = first
    memory.own[v] = second
    memory.shared[at] -= alpha * first / (np.sqrt(second) + eps)


@compiled
def binary_errors(x: Data, memory: Memory, rows: Array, bias: bool, errors: Array) -> float:
    """Compute (probability - y) / batch size of each row; return the summed loss.

    The logits of all rows are computed first: a row then need not wait for a cache line of the
    row before it, which another core wrote.
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
) -> Index:
    """Add the batch's gradient to a zero ``g``; return the number of entries of ``touched``.

    A coordinate whose sum is zero in between is entered twice: :func:`apply_binary` zeroes ``g``
    at the first entry and skips the second.
    """
    zero, count = g.dtype.type(0), np.uint64(0)
    for b in range(rows.shape[0]):
        e = errors[b]
        low, high = row_bounds(x, rows[b])
        for q in range(low, high):
            j = x.indices[q]
            before = g[j]
            touched[count] = j  # kept only the first time; without a branch to mispredict
            count += np.uint64(before == zero)
            g[j] = before + e * x.data[q]
        if bias:
            g[g.shape[0] - 1] += e
    return count


@inlined
def apply_binary(
    memory: Memory,
    settings: Settings,
    factors: Factors,
    touched: Array,
    count: Index,
    g: Array,
    alpha: Any,
) -> None:
    """Update the touched coordinates and zero ``g``.

    A cache line that another core wrote last was loaded with theta in shared state. A store needs
    it in exclusive state, and stores wait for that one after another: it is requested a few
    coordinates ahead. With a single thread all lines are exclusive already.
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
            at = j * width
            gradient += shared[at + ONE] * shared[at]
            adam(memory, at, j * stride, ONE, gradient, alpha, settings, factors)


@compiled
def binary(
    x: Data,
    memory: Memory,
    thread: Thread,
    settings: Settings,
    factors: Factors,
    updates: int,
    losses: Array,
) -> None:
    """``updates`` updates for each entry of ``losses``, which receives their summed loss.

    The batch that was prepared last is not used: the next call starts a new pass.
    """
    kind = memory.shared.dtype
    features = memory.shared.shape[0] // memory.width
    g = np.zeros(features, kind)
    errors = np.empty(settings.batch, kind)
    rows = np.empty(settings.batch, np.uint32)
    longest = 0
    for row in range(x.indptr.shape[0] - 1):
        longest = max(longest, x.indptr[row + 1] - x.indptr[row])
    # A coordinate is entered more than once if its sum was zero in between.
    touched = np.zeros(settings.batch * longest + 2 + AHEAD, np.uint32)
    prepare(x, thread, rows)
    for p in range(losses.shape[0]):
        for _ in range(updates):
            alpha = g.dtype.type(step_size(thread, settings, factors))
            losses[p] += binary_errors(x, memory, rows, settings.intercept, errors)
            count = binary_gradient(x, rows, settings.intercept, errors, g, touched)
            prepare(x, thread, rows)
            if settings.intercept:
                touched[count] = features - 1
                count += ONE
            apply_binary(memory, settings, factors, touched, count, g, alpha)


@compiled
def softmax(z: Array) -> float:
    """Replace logits by probabilities in place; return the log of the sum of exponentials."""
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
    """Compute the gradient of several classes; return the number of ``touched`` and the loss."""
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
def apply_multinomial(
    memory: Memory, settings: Settings, factors: Factors, j: Index, g: Array, alpha: Any
) -> None:
    """Update the coordinates of a touched feature and zero its row of ``g``."""
    shared, zero, classes = memory.shared, g.dtype.type(0), np.uint64(g.shape[1])
    at, m = j * memory.width, j * memory.stride
    decay = shared[at + classes]
    for k in range(classes):
        gradient = g[j, k]
        g[j, k] = zero
        if gradient != zero:
            gradient += decay * shared[at + k]
            adam(memory, at + k, m + k, classes, gradient, alpha, settings, factors)


@compiled
def multinomial(
    x: Data,
    memory: Memory,
    thread: Thread,
    settings: Settings,
    factors: Factors,
    updates: int,
    losses: Array,
) -> None:
    """Make updates as :func:`binary` does, for several classes."""
    kind = memory.shared.dtype
    features = memory.shared.shape[0] // memory.width
    g = np.zeros((features, settings.columns), kind)
    rows = np.empty(settings.batch, np.uint32)
    seen = np.zeros(features, np.bool_)
    touched = np.empty(features + 1, np.uint32)
    prepare(x, thread, rows)
    for p in range(losses.shape[0]):
        for _ in range(updates):
            alpha = g.dtype.type(step_size(thread, settings, factors))
            bias = settings.intercept
            count, loss = multinomial_gradient(x, memory, rows, bias, g, seen, touched)
            prepare(x, thread, rows)
            losses[p] += loss
            if bias:
                touched[count] = features - 1
                count += 1
            for j in touched[:count]:
                seen[j] = False
                apply_multinomial(memory, settings, factors, j, g, alpha)
