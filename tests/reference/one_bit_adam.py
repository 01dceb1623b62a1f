"""1-bit Adam (Tang et al. 2021, Algorithm 1), whose compressed momentum begins at zero."""

import numpy as np

from reference.participants import Array, Gradient


def one_bit_adam(
    start: Array,
    gradient: Gradient,
    *,
    size: int,
    warmup: int,
    steps: int,
    lr: float,
    beta: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
) -> Array:
    """Adam of mean gradients for ``warmup`` steps; then v stays, with signs of momenta.

    c_i = beta m + (1-beta) g_i + d_i, d_i = c_i - C(c_i) on each rank,
    s = (1/P) sum_i C(c_i) + e,        e = s - C(s),     m = C(s),
    x = x - lr (m + beta^t m_0) / (sqrt(v) + eps),

    C(y) = mean |y| sign(y). The second C is applied to ``size`` parts of s, one on each rank, of
    whole bytes of signs; what fills the last ones up counts as negative. m_0 is Adam's momentum
    after the warm-up: the paper begins with m = m_0. Returns x, (steps+1, d).
    """
    x, history = start.astype(np.float64), [start]
    adam, v = np.zeros_like(x), np.zeros_like(x)
    for k in range(warmup):
        g = np.mean([gradient(rank, x, k) for rank in range(size)], axis=0)
        adam, v = beta * adam + (1 - beta) * g, beta2 * v + (1 - beta2) * g * g
        root = np.sqrt(v / (1 - beta2 ** (k + 1))) + eps
        x = x - lr * adam / (1 - beta ** (k + 1)) / root
        history.append(x)
    part = 8 * -(-len(x) // (8 * size))
    m, left = np.zeros_like(x), np.zeros((size, len(x)))
    error = np.zeros(size * part)
    for k in range(warmup, steps):
        momenta = left + beta * m
        momenta += (1 - beta) * np.stack([gradient(rank, x, k) for rank in range(size)])
        sent = np.full((size, size * part), -1.0)
        sent[:, : len(x)] = np.where(momenta >= 0, 1.0, -1.0)
        sent *= np.abs(momenta).mean(axis=1, keepdims=True)
        left = momenta - sent[:, : len(x)]
        total = (sent.mean(axis=0) + error).reshape(size, part)
        signs = np.where(total >= 0, 1.0, -1.0)
        found = signs * np.abs(total).mean(axis=1, keepdims=True)
        error = (total - found).ravel()
        m, adam = found.ravel()[: len(x)], beta * adam
        x = x - lr * (m + adam) / root
        history.append(x)
    return np.stack(history)
