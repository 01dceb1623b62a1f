"""The largest gradients of each layer, of all rows at once (LAGS-SGD, SLGS-SGD)."""

from typing import final

import torch
from torch import Tensor

from offbeat.functional import count_kept, is_cheaper_dense
from offbeat.methods import TopK
from offbeat.methods.top_k.density import layer_densities
from offbeat.testing.virtual.rows import Rows
from offbeat.testing.virtual.rule import require


@final
class TopKRule:
    """The mean of what every row sends; the rest of its gradient waits in its residual."""

    def __init__(self, exchange: TopK, rows: Rows, x: Tensor) -> None:
        require(
            exchange, momentum=0.0, clip_norm=None, warmup=None, wire=None, units=None, over="world"
        )
        if isinstance(exchange.density, str) or callable(exchange.selection):
            raise ValueError(
                f"{exchange}: virtual workers know densities that are no measurements, and top-k; "
                "use offbeat.testing.simulate"
            )
        layers = dict(rows.layers) if exchange.scope == "layer" else {"": slice(0, x.shape[1])}
        sizes = {name: columns.stop - columns.start for name, columns in layers.items()}
        densities = layer_densities(exchange.density, sizes)
        self._kept = [(columns, _kept(columns, densities[n], x)) for n, columns in layers.items()]
        self._residual = torch.zeros_like(x)

    def combine(self, grads: Tensor) -> Tensor:
        """Return the mean of what was sent, in every row."""
        self._residual += grads
        sent = torch.zeros_like(grads)
        for columns, k in self._kept:
            part = self._residual[:, columns]
            chosen = part.abs().topk(k, dim=1, sorted=False).indices
            sent[:, columns].scatter_(1, chosen, part.gather(1, chosen))
        self._residual -= sent
        return sent.mean(0).expand_as(grads).contiguous()


def _kept(columns: slice, density: float, x: Tensor) -> int:
    numel = columns.stop - columns.start
    k = count_kept(numel, density)
    return numel if is_cheaper_dense(numel, k, x.itemsize, len(x)) else k
