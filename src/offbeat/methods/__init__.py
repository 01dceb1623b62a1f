"""The exchanges of all methods, for the two slots of an algorithm.

:class:`Mean`, :class:`TopK`, :class:`Compressed` and :class:`TorchDDP` exchange gradients during
backward; to add a compressor, subclass :class:`Compressor` and pass it to :class:`Compressed`. All
others exchange parameters after the optimizer step.
"""

from offbeat.methods.adasum.adasum_update import AdasumUpdate
from offbeat.methods.average import Average
from offbeat.methods.compressed import Compressed, Compressor
from offbeat.methods.mean import Mean
from offbeat.methods.outer.outer_gossip import OuterGossip
from offbeat.methods.outer.outer_step import OuterStep
from offbeat.methods.outer.slow_momentum import SlowMomentum
from offbeat.methods.outer.sparse_mean import Sparse
from offbeat.methods.pair_average.pair_average import PairAverage
from offbeat.methods.push_sum.push_sum import PushSum
from offbeat.methods.stale_average.stale_average import StaleAverage
from offbeat.methods.top_k.assumption import deltas
from offbeat.methods.top_k.top_k import TopK
from offbeat.methods.torch_ddp import TorchDDP
from offbeat.topology.schedule import Cycle

__all__ = [
    "AdasumUpdate",
    "Average",
    "Compressed",
    "Compressor",
    "Cycle",
    "Mean",
    "OuterGossip",
    "OuterStep",
    "PairAverage",
    "PushSum",
    "SlowMomentum",
    "Sparse",
    "StaleAverage",
    "TopK",
    "TorchDDP",
    "deltas",
]
