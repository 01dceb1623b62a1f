"""A switch from one method to another: where the second begins, and with what."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from reference.participants import Array, Gradient, Nodes

Method = Callable[..., Array]


class Part(NamedTuple):
    """A method between two switches.

    ``equal``: the ranks whose models it keeps equal, 2 all, 1 those of a node, or 0.
    ``drained``: called as the method, with what is in flight at the end in the last models; all
    mass moves by the optimizers' updates only.
    ``residual``: called as the method, what its ranks have not sent of their gradients.
    ``averages``: it may begin with models that differ, as it averages them.
    """

    method: Method
    equal: int = 0
    drained: Method | None = None
    residual: Method | None = None
    averages: bool = False


def switched(
    first: Part,
    second: Part,
    start: Array,
    gradient: Gradient,
    *,
    nodes: Nodes,
    at: int,
    steps: int,
    lr: float,
    momentum: float,
) -> Array:
    """z of ``first`` for ``at`` steps, and of ``second`` after them; (steps+1, ranks, d).

    Nodes are of one size; ``at`` is a multiple of the periods of both, so that the second may
    count from 0. It begins with the mean of the models, which counts what is in flight (start -
    lr sum_k mean_r v_r), or with the models, if it averages them; and with the velocities: with
    their mean where it keeps more ranks equal than the first. What the first has not sent is added
    to the first gradients: to each rank's own where the second keeps residuals too; else all ranks
    get the mean. After a first that keeps no ranks equal, models are averaged once more before a
    second that keeps all equal: after the step of each rank by its own gradient, in place of both
    the mean before it and that of the gradients.
    """
    given = {"nodes": nodes, "lr": lr, "momentum": momentum}
    before = first.method(start, gradient, steps=at, **given)
    ranks = before.shape[1]
    velocities = _velocities(first, before, gradient, nodes, lr, momentum)
    begins = before[-1].mean(axis=0)
    if first.drained is not None:
        begins = start - lr * velocities.mean(axis=1).sum(axis=0)
    if first.drained is not None and second.averages:
        begins = first.drained(start, gradient, steps=at, **given)[-1]
    carried = momentum * velocities[-1]
    met = np.zeros((0, ranks, start.size))
    if first.drained is not None and second.equal == 2:
        models = first.drained(start, gradient, steps=at, **given)[-1]
        carried = carried + [gradient(rank, z, at) for rank, z in enumerate(models)]
        begins = (models - lr * carried).mean(axis=0)
        met, carried, at = np.tile(begins, (1, ranks, 1)), momentum * carried, at + 1
    if second.equal > first.equal:
        carried = np.tile(carried.mean(axis=0), (ranks, 1))
    left = np.zeros_like(carried)
    if first.residual is not None:
        left = first.residual(start, gradient, steps=at, **given)[-1]

    def following(rank: int, z: Array, k: int) -> Array:
        g = gradient(rank, z, at + k)
        if k == 0 and first.residual is not None and second.residual is None:
            g = np.mean([gradient(r, z, at) + left[r] for r in range(ranks)], axis=0)
        elif k == 0:
            g = g + left[rank]
        return g + carried[rank] if k == 0 else g  # v_1 = m v_0 + g

    after = second.method(begins, following, steps=steps - at, **given)
    return np.concatenate([before, met, after[1:]])


def _velocities(
    part: Part, z: Array, gradient: Gradient, nodes: Nodes, lr: float, momentum: float
) -> Array:
    """v = m v + g of every rank and step, where g is the mean over the ranks it keeps equal."""
    if part.equal == 2:  # whatever was combined, all have stepped by it
        differences: Array = (z[:-1] - z[1:]) / lr
        return differences
    v, found = np.zeros_like(z[0]), []
    for k, models in enumerate(z[:-1]):
        g = np.stack([gradient(rank, model, k) for rank, model in enumerate(models)])
        for node in nodes if part.equal else ():
            g[list(node)] = g[list(node)].mean(axis=0)
        v = momentum * v + g
        found.append(v)
    return np.stack(found)
