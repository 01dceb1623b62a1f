"""NoLoCo (Kolehmainen et al. 2025), one row per participant."""

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


def pairs(size: int, seed: int, index: int) -> list[list[int]]:
    """Neighbours in a random order; the last is alone if the number is odd."""
    order = np.random.default_rng([seed, index]).permutation(size)
    return [[int(i) for i in order[first : first + 2]] for first in range(0, size, 2)]


def noloco(
    start: Array,
    gradient: Gradient,
    *,
    nodes: Nodes,
    steps: int,
    every: int,
    lr: float,
    momentum: float = 0.0,
    alpha: float = 0.5,
    beta: float = 0.7,
    gamma: float = 0.7,
    seed: int = 0,
    within_local: bool = False,
) -> Array:
    """theta_i = SGD(theta_i); every H steps with the group G of i; (steps+1, ranks, d).

    Delta_i = phi_i - theta_i, an outer gradient;
    delta_i = alpha delta_i - (beta / |G|) sum_G Delta - gamma (phi_i - (1 / |G|) sum_G phi);
    phi_i = phi_i + delta_i; theta_i = phi_i.
    """
    groups = participants(nodes, within_local)
    inner = SGD(lr, momentum)
    theta = start_rows(start, groups)
    phi, delta, velocity = theta.copy(), np.zeros_like(theta), np.zeros_like(theta)
    history = [theta]
    for t in range(steps):
        gradients = mean_gradients(gradient, groups, theta, t)
        theta, velocity = inner.step(theta, gradients, velocity)
        if (t + 1) % every == 0:
            outer = phi - theta
            delta = alpha * delta
            for pair in pairs(len(phi), seed, t // every):
                delta[pair] -= beta * outer[pair].mean(axis=0)
                delta[pair] -= gamma * (phi[pair] - phi[pair].mean(axis=0))
            phi = phi + delta
            theta = phi.copy()
        history.append(theta)
    return per_rank(history, groups)
