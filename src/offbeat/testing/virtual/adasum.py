"""Adasum of the updates of all rows, a level of the tree at a time."""

from typing import final

import torch
from torch import Tensor

from offbeat.functional import adasum
from offbeat.methods import AdasumUpdate
from offbeat.testing.virtual.rows import Rows, first_of
from offbeat.testing.virtual.rule import require
from offbeat.topology.schedule import due


@final
class AdasumRule:
    """Combines the updates since the last exchange, layer by layer."""

    def __init__(self, exchange: AdasumUpdate, rows: Rows, x: Tensor) -> None:
        require(exchange, wire=None, partition=False, nonfinite="raise")
        self._every, self._groups = exchange.every, rows.participants(exchange.over)
        self._layers = rows.layers
        self._anchor = x[0].clone()

    def step(self, x: Tensor, step: int) -> None:
        """Add the combined update to the anchor, and give it to all rows."""
        if not due(step, self._every):
            return
        updates = first_of(x, self._groups) - self._anchor
        for columns in self._layers.values():
            self._anchor[columns] += tree(updates[:, columns])
        x.copy_(self._anchor.expand_as(x))


def tree(rows: Tensor) -> Tensor:
    """Combine rows (P, m) as :func:`offbeat.functional.tree` does, all pairs of a level at once.

    >>> tree(torch.tensor([[1.0], [2.0], [6.0]]))
    tensor([3.])
    """
    pairs_of = torch.vmap(adasum)
    leaves, rest = 1, (0, rows[:0])  # of every row, and of the one that was left over
    while len(rows) > 1:
        even = len(rows) // 2 * 2
        left = rows[even:]
        rows = pairs_of(rows[:even:2], rows[1:even:2])
        if len(left) and rest[0]:
            rest = (leaves + rest[0], adasum(left[0], rest[1][0], (leaves, rest[0])).unsqueeze(0))
        elif len(left):
            rest = (leaves, left)
        leaves *= 2
    return adasum(rows[0], rest[1][0], (leaves, rest[0])) if rest[0] else rows[0]
