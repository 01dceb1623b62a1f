"""Averages: of gradients, and of parameters every so often."""

from typing import final

from torch import Tensor

from offbeat.methods import Average, Mean
from offbeat.testing.virtual.rows import Rows, first_of, mean_of, spread
from offbeat.testing.virtual.rule import require
from offbeat.topology.schedule import due


@final
class MeanRule:
    """The mean gradient of all workers, or of those of a node."""

    def __init__(self, exchange: Mean, rows: Rows, x: Tensor) -> None:
        require(exchange, wire=None, partition=False)
        self._groups = [rows.workers] if exchange.over == "world" else rows.nodes

    def combine(self, grads: Tensor) -> Tensor:
        """Return the mean of its group in every row."""
        spread(mean_of(grads, self._groups), self._groups, grads)
        return grads


@final
class AverageRule:
    """The mean of all participants every ``every`` steps (Local SGD)."""

    def __init__(self, exchange: Average, rows: Rows, x: Tensor) -> None:
        require(exchange, nonfinite="raise")
        self._every, self._groups = exchange.every, rows.participants(exchange.over)

    def step(self, x: Tensor, step: int) -> None:
        """Set all rows to the mean of the participants."""
        if due(step, self._every):
            x.copy_(first_of(x, self._groups).mean(0).expand_as(x))
