"""DiLoCo (Douillard et al. 2023) and Streaming DiLoCo (2025), one row per participant."""

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

ALL = (slice(None),)


def diloco(
    start: Array,
    gradient: Gradient,
    *,
    nodes: Nodes,
    steps: int,
    every: int,
    lr: float,
    momentum: float = 0.0,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    fragments: tuple[slice, ...] = ALL,
    delay: int = 0,
    mixing: float = 0.0,
    within_local: bool = False,
) -> Array:
    """theta_m = SGD(theta_m); the global theta by Nesterov SGD on fragments; (steps+1, ranks, d).

    After t inner steps, t mod H = floor(p H / P): Delta_p = mean over m of (theta - theta_m) on
    fragment p is sent. After t + tau steps theta = Outer(theta, Delta_p) on p, and there
    theta_m = alpha theta_m + (1 - alpha) theta. What is received comes before what is sent,
    except that tau = 0 receives what it has just sent.
    """
    groups = participants(nodes, within_local)
    inner = SGD(lr, momentum)
    outer = SGD(outer_lr, outer_momentum, nesterov=outer_momentum > 0)
    z = start_rows(start, groups)
    velocity = np.zeros_like(z)
    theta, outer_velocity = z[0].copy(), np.zeros_like(z[0])
    sent: dict[int, Array] = {}
    history = [z]

    def receive(z: Array, p: int) -> Array:
        part, delta = fragments[p], sent.pop(p)
        theta[part], outer_velocity[part] = outer.step(theta[part], delta, outer_velocity[part])
        z = z.copy()
        z[:, part] = mixing * z[:, part] + (1 - mixing) * theta[part]
        return z

    for t in range(1, steps + 1):
        gradients = mean_gradients(gradient, groups, z, t - 1)
        z, velocity = inner.step(z, gradients, velocity)
        for p, part in enumerate(fragments):
            turn = p * every // len(fragments)
            if p in sent and (t - delay - turn) % every == 0:
                z = receive(z, p)
            if (t - turn) % every == 0:
                sent[p] = (theta[part] - z[:, part]).mean(axis=0)
                z = receive(z, p) if delay == 0 else z
        history.append(z)
    return per_rank(history, groups)
