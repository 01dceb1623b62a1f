"""DASO (Coquelin et al. 2021), one row per node: the ranks of a node hold one model."""

from collections.abc import Callable, Sequence
from math import inf

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


def eq_1(x: Array, sent: Array, wait: int) -> Array:
    """x_l = (2W x_l + sum_i x_i) / (2W + P) for every row x_l; `sent` are the rows x_i."""
    result: Array = (2 * wait * x + sent.sum(axis=0)) / (2 * wait + len(sent))
    return result


def exact(x: Array, sent: Array) -> Array:
    """x_l = mean_i x_i + (x_l - what it sent) for every row x_l; `sent` are the rows x_i."""
    result: Array = sent.mean(axis=0) + (x - sent)
    return result


def blocking(
    x: Array, r: Array, e: Array, rounded: Callable[[Array], Array]
) -> tuple[Array, Array]:
    """m_i = round(x_i - r + e_i), x = r + round(mean m); returns x and what was lost, e - m."""
    wanted = x - r + e
    sent = rounded(wanted)
    return r + rounded(sent.mean(axis=0)), wanted - sent


def paces(
    losses: Sequence[float], every: int, wait: int, patience: int, threshold: float = 1e-4
) -> list[tuple[int, int]]:
    """(B, W) after each loss: halved when more than `patience` in a row are no better."""
    b, w, best, bad = every, wait, inf, 0
    history: list[tuple[int, int]] = []
    for loss in losses:
        if loss < best * (1 - threshold):
            best, bad = loss, 0
        else:
            bad += 1
        if bad > patience:
            b, w, bad, best = (every, wait, 0, inf) if b == 1 else (b // 2, max(1, w // 2), 0, best)
        history.append((b, w))
    return history


def daso(
    start: Array,
    gradient: Gradient,
    *,
    nodes: Nodes,
    steps: int,
    lr: float,
    momentum: float = 0.0,
    every: int,
    wait: int,
    warmup: int = 0,
    cooldown: int = 0,
    total: int | None = None,
    rounded: Callable[[Array], Array] = lambda x: x,
    pace: Callable[[int], tuple[int, int]] | None = None,
    inside: Callable[[Array, int], Array] | None = None,
    is_exact: bool = False,
) -> Array:
    """SGD on the node's mean gradient, or on `inside(z, k)`; then step k = 0, ... by its phase.

    Blocking: x = the nodes' mean. Cycling: where (k+1) mod B = 0 the rows are sent, and merged by
    eq. 1 at step k + W; one sum at a time, merged before the next is sent, and at the latest at
    the first blocking step, before its mean; `is_exact`: by the merge that forgets nothing.
    `pace(k)` is (B, W) at step k. (steps+1, ranks, d).
    """
    groups = participants(nodes, within_local=True)
    optimizer = SGD(lr, momentum)
    z = start_rows(start, groups)
    velocity = np.zeros_like(z)
    r, e = z.mean(axis=0), np.zeros_like(z)
    sent: Array | None = None
    history, due, w_sent = [z], 0, 0
    ends = inf if total is None else total - cooldown
    for k in range(steps):
        g = mean_gradients(gradient, groups, z, k) if inside is None else inside(z, k)
        z, velocity = optimizer.step(z, g, velocity)
        blocks = k < warmup or k >= ends
        if sent is not None and (blocks or k == due):
            z, sent = exact(z, sent) if is_exact else eq_1(z, sent, w_sent), None
        b, w = (every, wait) if pace is None else pace(k)
        if blocks:
            if k == 0 or warmup <= k == ends:  # the first of a phase: no reference, nothing lost
                r, e = z.mean(axis=0), np.zeros_like(z)
            else:
                r, e = blocking(z, r, e, rounded)
            z = np.tile(r, (len(z), 1))
        elif sent is None and (k + 1) % b == 0 and (total is None or min(k + w, ends) < total):
            sent, due, w_sent = z, k + w, w
        history.append(z)
    return per_rank(history, groups)
