"""Exchanges of parameters after the optimizer step, for the parameters slot of an algorithm."""

from offbeat.parameters.adasum.adasum_update import AdasumUpdate
from offbeat.parameters.average import Average
from offbeat.parameters.outer.outer_step import OuterStep
from offbeat.parameters.outer.slow_momentum import SlowMomentum
from offbeat.parameters.outer.sparse_mean import Sparse
from offbeat.parameters.pair_average.pair_average import PairAverage
from offbeat.parameters.push_sum.push_sum import PushSum
from offbeat.parameters.stale_average.stale_average import StaleAverage
from offbeat.schedule import Cycle

__all__ = [
    "AdasumUpdate",
    "Average",
    "Cycle",
    "OuterStep",
    "PairAverage",
    "PushSum",
    "SlowMomentum",
    "Sparse",
    "StaleAverage",
]
