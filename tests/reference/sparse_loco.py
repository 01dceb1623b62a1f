"""SparseLoCo (Sarfi et al. 2025, Algorithm 1), one row per participant."""

from itertools import pairwise

import numpy as np

from reference.participants import (
    Array,
    Gradient,
    Nodes,
    mean_gradients,
    participants,
    per_rank,
    start_rows,
)
from reference.sgd import SGD


def sparse_loco(
    start: Array,
    gradient: Gradient,
    *,
    nodes: Nodes,
    steps: int,
    every: int,
    lr: float,
    layers: tuple[int, ...],
    density: float,
    decay: float,
    bits: int | None,
    momentum: float = 0.0,
    outer_lr: float = 1.0,
    within_local: bool = False,
) -> Array:
    """Delta_r = theta - theta_r;  e_r = beta e_r + Delta_r;  m_r = Q(TopK(e_r));  e_r -= m_r.

    Then theta -= alpha (1/R) sum_r m_r, and theta_r = theta; (steps+1, ranks, d). ``layers`` are
    the sizes of the layers: TopK and Q act on each by itself (no layer here exceeds 4096 entries),
    and between nodes on what each rank of a node has of it.
    """
    groups = participants(nodes, within_local)
    shares = min(len(group) for group in groups) if within_local else 1
    spans = _spans(layers, shares)
    inner = SGD(lr, momentum)
    z = start_rows(start, groups)
    velocity, theta, error = np.zeros_like(z), z[0].copy(), np.zeros_like(z)
    history = [z]
    for t in range(1, steps + 1):
        z, velocity = inner.step(z, mean_gradients(gradient, groups, z, t - 1), velocity)
        if t % every == 0:
            error = decay * error + (theta - z)
            sent = np.stack([_compress(row, spans, density, bits) for row in error])
            error = error - sent
            theta = theta - outer_lr * sent.mean(axis=0)
            z = np.tile(theta, (len(z), 1))
        history.append(z)
    return per_rank(history, groups)


def _spans(layers: tuple[int, ...], shares: int) -> list[slice]:
    """Return the parts of layers that lie between two cuts: ends of layers, and of shares."""
    total = sum(layers)
    share = -(-total // shares)
    cuts = {0, *np.cumsum(layers).tolist(), *range(0, total, share)}
    return [slice(a, b) for a, b in pairwise(sorted(cuts))]


def _compress(row: Array, spans: list[slice], density: float, bits: int | None) -> Array:
    sent = np.zeros_like(row)
    for span in spans:
        part = row[span]
        k = max(1, int(density * len(part)))
        chosen = [i for i in np.argsort(-np.abs(part), kind="stable")[:k] if part[i] != 0]
        if chosen:
            sent[span][chosen] = part[chosen] if bits is None else _quantize(part[chosen], bits)
    return sent


def _quantize(values: Array, bits: int) -> Array:
    """Round magnitudes to the middles of 2^(bits-1) equal parts of their range."""
    low, high = (float(np.float32(f(np.abs(values)))) for f in (np.min, np.max))
    if low == high:
        return np.sign(values) * low
    edges = np.linspace(low, high, 2 ** (bits - 1) + 1)
    part = np.clip(np.searchsorted(edges, np.abs(values), side="right") - 1, 0, len(edges) - 2)
    return np.sign(values) * (edges[part] + edges[part + 1]) / 2
