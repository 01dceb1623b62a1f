"""Gossip between all rows at once (SGP, Overlap SGP, D-PSGD)."""

from typing import final

import torch
from torch import Tensor

from offbeat.methods import PushSum
from offbeat.testing.virtual.rows import Rows, first_of, spread
from offbeat.testing.virtual.rule import require
from offbeat.topology.graph import validate
from offbeat.topology.schedule import due


@final
class PushSumRule:
    r"""Sends along all edges of a graph at once.

    .. math::
        X \leftarrow P\,(w Z^{anchor} + Z - Z^{anchor}), \quad w \leftarrow P w, \quad Z = X / w

    for the mixing matrix P of the exchange, with one row for each participant. Under overlap what
    is off its diagonal arrives ``overlap`` steps later. Time: the number of edges times d.
    """

    def __init__(self, exchange: PushSum, rows: Rows, x: Tensor) -> None:
        require(exchange, wire=None, biased=False, nonfinite="raise")
        self._groups, self._topology = rows.participants(exchange.over), exchange.topology
        if len(self._groups) > 1:
            validate(self._topology, len(self._groups))
        self._overlap, self._weighted = exchange.overlap, exchange.weighted_updates
        self._every = max(exchange.every, exchange.overlap)
        self._anchor = first_of(x, self._groups)
        self._weights = x.new_ones(len(self._groups), 1)
        self._arriving: tuple[Tensor, Tensor] | None = None

    def step(self, x: Tensor, step: int) -> None:
        """Exchange if it is a sending step."""
        now = first_of(x, self._groups)
        anchor = now if self._weighted else self._anchor
        total = self._weights * anchor + (now - anchor)
        index, every = step // self._every, self._every
        sends = step % every == 0 if self._overlap else due(step, every)
        if sends and self._topology.is_mean(len(now), index) and not self._overlap:
            total = total.mean(0).expand_as(total)
            self._weights = self._weights.mean(0).expand_as(self._weights)
        elif sends and len(now) > 1:
            total = self._exchange(total, index)
        self._anchor = total / self._weights
        spread(self._anchor, self._groups, x)

    def _exchange(self, total: Tensor, index: int) -> Tensor:
        size = len(self._groups)
        graph = [self._topology.peers(rank, size, index) for rank in range(size)]
        keep = total.new_tensor([peers.keep for peers in graph]).unsqueeze(1)
        edges = [(to, rank, share) for rank, peers in enumerate(graph) for to, share in peers.send]
        targets, sources, shares = zip(*edges, strict=True)
        # Sparse: a row for each edge of a dense graph would be a thousand times the model.
        places = torch.tensor([targets, sources], device=total.device)
        values = total.new_tensor(shares)
        away = torch.sparse_coo_tensor(places, values, (size, size), check_invariants=True)
        sent = away @ total, away @ self._weights
        total, self._weights = keep * total, keep * self._weights
        arrived = self._arriving if self._overlap else sent
        self._arriving = sent
        if arrived is not None:
            total, self._weights = total + arrived[0], self._weights + arrived[1]
        return total
