"""Exchanges of gradients during backward, for the gradients slot of an algorithm.

``top_k`` is LAGS-SGD (Shi et al. 2020). To add a compressor, subclass :class:`Compressor` and pass
it to :class:`Compressed`.
"""

from offbeat.gradients.compressed import Compressed
from offbeat.gradients.compressor import Compressor
from offbeat.gradients.mean import Mean
from offbeat.gradients.top_k.assumption import deltas
from offbeat.gradients.top_k.top_k import TopK
from offbeat.gradients.torch_ddp import TorchDDP

__all__ = ["Compressed", "Compressor", "Mean", "TopK", "TorchDDP", "deltas"]
