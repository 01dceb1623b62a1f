"""Methods whose means are weighted: rank r's step k stands for samples[k, r] samples.

Written from the sums alone: each mean is sum W x / sum W, where W is what a rank's steps since the
last mean stand for. A step that stands for none leaves a rank's own model as it was; in one of NaN
samples a rank rests, and its momentum stays, too.
"""

from collections.abc import Callable, Sequence

import numpy as np

from reference.adasum import combine_layers
from reference.participants import Array, Gradient
from reference.push_sum import Matrix, mix
from reference.sgd import SGD

Run = tuple[Array, Gradient, Array]  # start (d,), gradient, samples (steps, ranks)


def mean(rows: Array, weights: Array) -> Array:
    """sum_r W_r x_r / sum_r W_r."""
    result: Array = (weights[:, None] * rows).sum(axis=0) / weights.sum()
    return result


def ddp(run: Run, lr: float, momentum: float) -> Array:
    """All ranks step by the weighted mean of the gradients; (steps+1, ranks, d)."""
    start, gradient, samples = run
    z, velocity = np.tile(start, (samples.shape[1], 1)), np.zeros_like(start)
    history = [z]
    for k, weights in enumerate(samples):
        g = np.stack([gradient(r, z[r], k) for r in range(len(z))])
        row, velocity = SGD(lr, momentum).step(z[0], mean(g, weights), velocity)
        history.append(z := np.tile(row, (len(z), 1)))
    return np.stack(history)


def _own_steps(
    run: Run, lr: float, momentum: float, exchange: Callable[[int, Array, Array], Array]
) -> Array:
    """Each rank steps by itself, then exchange(k, z before, z after) returns new models."""
    start, gradient, samples = run
    z = np.tile(start, (samples.shape[1], 1))
    velocity, history = np.zeros_like(z), [z]
    for k, weights in enumerate(samples):
        g = np.stack([gradient(r, z[r], k) for r in range(len(z))])
        after, faster = SGD(lr, momentum).step(z, g, velocity)
        velocity = np.where(np.isnan(weights)[:, None], velocity, faster)
        after = np.where(weights[:, None] > 0, after, z)
        history.append(z := exchange(k, z, after))
    return np.stack(history)


def local_sgd(run: Run, lr: float, momentum: float, every: int) -> Array:
    """z = sum W z / sum W every few steps."""
    samples = np.nan_to_num(run[2])

    def exchange(k: int, before: Array, z: Array) -> Array:
        if (k + 1) % every:
            return z
        return np.tile(mean(z, samples[k + 1 - every : k + 1].sum(axis=0)), (len(z), 1))

    return _own_steps(run, lr, momentum, exchange)


def diloco(
    run: Run,
    lr: float,
    momentum: float,
    every: int,
    fragments: Sequence[slice] = (slice(None),),
    delay: int = 0,
    mixing: float = 0.0,
) -> Array:
    """Nesterov SGD (0.7, 0.9) steps theta by theta - sum W z / sum W, fragment by fragment."""
    samples, outer = np.nan_to_num(run[2]), SGD(0.7, 0.9, nesterov=True)
    theta, speed, sent = run[0].copy(), np.zeros_like(run[0]), dict[int, Array]()
    last = [0] * len(fragments)

    def receive(z: Array, p: int) -> None:
        part = fragments[p]
        theta[part], speed[part] = outer.step(theta[part], sent.pop(p), speed[part])
        z[:, part] = mixing * z[:, part] + (1 - mixing) * theta[part]

    def exchange(k: int, before: Array, z: Array) -> Array:
        z = z.copy()
        for p, part in enumerate(fragments):
            turn = p * every // len(fragments)
            if p in sent and (k + 1 - delay - turn) % every == 0:
                receive(z, p)
            if (k + 1 - turn) % every == 0:
                window = samples[last[p] : k + 1].sum(axis=0)
                sent[p], last[p] = theta[part] - mean(z[:, part], window), k + 1
                if delay == 0:
                    receive(z, p)
        return z

    return _own_steps(run, lr, momentum, exchange)


def adasum(run: Run, lr: float, momentum: float, every: int, layers: Sequence[int]) -> Array:
    """a = a + AS(n W_r / sum W (z_r - a))."""
    samples, anchor = run[2], run[0].copy()

    def exchange(k: int, before: Array, z: Array) -> Array:
        if (k + 1) % every:
            return z
        window = samples[k + 1 - every : k + 1].sum(axis=0)
        updates = (z - anchor) * (len(z) * window / window.sum())[:, None]
        anchor[:] = anchor + combine_layers(updates, layers)
        return np.tile(anchor, (len(z), 1))

    return _own_steps(run, lr, momentum, exchange)


def sgp(run: Run, lr: float, momentum: float, matrix: Matrix, overlap: int = 0) -> Array:
    """x = w z + s (SGD(z) - z); x, w = P x, P w; z = x / w. w grows with s, before x is made.

    It falls with s too, by at most a half in a step: m is what of s is in it.
    """
    samples, size = run[2], run[2].shape[1]
    w, m = np.ones(size), np.ones(size)
    arrivals = dict[int, tuple[Array, Array]]()

    def exchange(k: int, z: Array, after: Array) -> Array:
        grown = np.maximum(samples[k] - m, -w / 2)
        w[:], m[:] = w + grown, m + grown
        x = w[:, None] * z + samples[k][:, None] * (after - z)
        if overlap and k % overlap:
            left: Array = x / w[:, None]
            return left
        p = matrix(size, k // max(1, overlap))
        away = p - np.diag(np.diag(p))
        arrivals[k + overlap] = mix(away, x, w)
        x, w[:] = mix(p - away, x, w)
        more_x, more_w = arrivals.pop(k, (np.zeros_like(x), np.zeros_like(w)))
        w[:] = w + more_w
        result: Array = (x + more_x) / w[:, None]
        return result

    return _own_steps(run, lr, momentum, exchange)


def daso(run: Run, lr: float, momentum: float, every: int, wait: int) -> Array:
    """Nodes of one rank, cycling only: z = (2W z + n sum V z' / sum V)/(2W + n), W steps late."""
    samples, sent, last = run[2], dict[int, Array](), [0]

    def exchange(k: int, before: Array, z: Array) -> Array:
        size = len(z)
        if k in sent:
            z = (2 * wait * z + size * sent.pop(k)) / (2 * wait + size)
        if (k + 1) % every == 0 and not sent and k + wait < len(samples):
            sent[k + wait] = mean(z, samples[last[0] : k + 1].sum(axis=0))
            last[0] = k + 1
        return z

    return _own_steps(run, lr, momentum, exchange)
