"""DASO's phases: blocking averages of the nodes, or sums that are merged some steps later."""

from typing import final

import torch
from torch import Tensor

from offbeat.functional import cast_difference, merge_exact_sum, merge_stale_sum
from offbeat.methods import StaleAverage
from offbeat.testing.virtual.rows import Rows, first_of, spread
from offbeat.testing.virtual.rule import require


@final
class StaleAverageRule:
    """Keeps one row for each participant; losses are not reported, so B and W stay as they are."""

    def __init__(self, exchange: StaleAverage, rows: Rows, x: Tensor) -> None:
        require(exchange, nonfinite="raise")
        self._groups, self._cycle = rows.participants(exchange.over), exchange.cycle
        self._is_rounded = exchange.wire is not None
        self._reference = first_of(x, self._groups)
        self._error = torch.zeros_like(self._reference)
        self._is_exact = exchange.merge == "exact"
        self._sum: Tensor | None = None
        self._sent = self._reference
        self._due = 0

    def step(self, x: Tensor, step: int) -> None:
        """Merge the sum that is due, then average or start the next sum."""
        now, cadence = first_of(x, self._groups), self._cycle.start
        blocking = self._cycle.is_blocking(step)
        if self._sum is not None and (blocking or step >= self._due):
            totals = self._sum.repeat(len(now), 1)
            if self._is_exact:
                merge_exact_sum(totals.view(-1), now.view(-1), self._sent.view(-1), len(now))
            else:
                merge_stale_sum(totals.view(-1), now.view(-1), cadence.wait, len(now))
            now, self._sum = totals, None
        if blocking:
            now = self._average(now, exact=self._cycle.opens(step))
        elif self._sum is None and self._cycle.sends(step, cadence):
            self._sum, self._sent, self._due = now.sum(0), now, step + cadence.wait
        spread(now, self._groups, x)

    def _average(self, now: Tensor, exact: bool) -> Tensor:
        if exact or not self._is_rounded:
            self._error.zero_()
            self._reference = now.mean(0).repeat(len(now), 1)
        else:
            message = torch.empty_like(now, dtype=torch.bfloat16)
            cast_difference(now, self._reference, self._error, message)
            self._reference += message.float().mean(0).bfloat16().to(now.dtype)
        return self._reference.clone()
