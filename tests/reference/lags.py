"""LAGS-SGD: top-k with error feedback layer by layer (Shi et al. 2020, Algorithm 1)."""

from collections.abc import Callable, Sequence

import numpy as np

from reference.participants import Array, Gradient, Nodes, per_rank, start_rows
from reference.sgd import SGD


def top_k(x: Array, k: int) -> Array:
    """x where |x| is among the k largest, else 0."""
    sent = np.zeros_like(x)
    chosen = np.argsort(-np.abs(x), kind="stable")[:k]
    sent[chosen] = x[chosen]
    return sent


def sent_of(d: int, density: float, ranks: int, value: int = 8) -> int:
    """k = max(1, floor(density d)); all d where (values, indices) of k cost as much as 2 d values.

    In float64 an all-gather of k costs (P-1) k (8 + 4) bytes, an all-reduce 2 (P-1)/P d 8.
    """
    k = max(1, int(density * d))
    return d if 2 * d * 8 <= ranks * k * (value + 4) else k


def fp16(message: Array) -> Array:
    """Scaled by a power of two to below 2^14, float32 in between, rounded to float16."""
    scale = 2.0 ** (14 - int(np.frexp(np.abs(message).max())[1]))
    narrow = (message * scale).astype(np.float32).astype(np.float16)
    return np.divide(narrow.astype(np.float64), scale)


def lags(
    start: Array,
    gradient: Gradient,
    *,
    nodes: Nodes,
    steps: int,
    lr: float | Sequence[float],
    layers: Sequence[int],
    density: float | Sequence[float],
    momentum: float = 0.0,
    correction: float = 0.0,
    masking: bool = False,
    clip: float = np.inf,
    lr_units: bool = False,
    rounded: Callable[[Array], Array] | None = None,
) -> tuple[Array, Array]:
    """v = SGD(v, (1/P) sum_p TopK(acc_p) / a), acc_p = e_p + a g_p, e_p = acc_p - TopK(acc_p).

    a is lr in units of lr * gradient, else 1. ``correction`` is deep gradient compression's:
    u_p = m u_p + g_p takes the place of g_p, and with ``masking`` is zero where TopK sent
    something, except in layers that are sent whole. Before that each layer of g_p / P is shortened
    to ``clip`` / sqrt(P). ``density`` is one for all layers or one for each. ``rounded`` rounds to
    16 bits what a rank sends of the layers that are not sent whole, over P and in units of the
    gradient; the error stays in e. Returns v, (steps+1, ranks, d), and e, (steps+1, ranks, d).
    """
    ranks = len(sum(nodes, ()))
    world: Nodes = tuple((rank,) for rank in range(ranks))
    rates = [lr] * steps if isinstance(lr, float) else list(lr)
    v = start_rows(start, world)
    residual, u, velocity = np.zeros_like(v), np.zeros_like(v), np.zeros_like(v)
    ends = np.cumsum(layers)
    densities = [density] * len(layers) if isinstance(density, float) else density
    models, residuals = [v], [residual]
    for k, rate in enumerate(rates):
        unit = rate if lr_units else 1.0
        g = np.stack([gradient(rank, v[rank], k) for rank in range(ranks)])
        for end, d in zip(ends, layers, strict=True):
            shares = np.sqrt(np.square(g[:, end - d : end] / ranks).sum(axis=1, keepdims=True))
            g[:, end - d : end] /= np.maximum(1, shares / (clip / np.sqrt(ranks)))
        u = correction * u + g
        acc = residual + unit * u
        sent, sparse = np.zeros_like(acc), np.zeros(len(start), bool)
        for end, d, share in zip(ends, layers, densities, strict=True):
            layer = slice(end - d, end)
            count = sent_of(d, share, ranks, 8 if rounded is None else 2)
            sent[:, layer] = [top_k(row, count) for row in acc[:, layer]]
            if masking and count < d:
                u[:, layer][sent[:, layer] != 0] = 0
            sparse[layer] = count < d
        if rounded is not None:
            messages = [rounded(row) for row in sent[:, sparse] / unit / ranks]
            sent[:, sparse] = np.stack(messages) * ranks * unit
        residual = acc - sent
        combined = np.tile(sent.mean(axis=0), (ranks, 1)) / unit
        v, velocity = SGD(rate, momentum).step(v, combined, velocity)
        models.append(v)
        residuals.append(residual)
    return per_rank(models, world), per_rank(residuals, world)
