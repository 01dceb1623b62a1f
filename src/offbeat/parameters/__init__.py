"""What fills the parameters slot: exchanges after the optimizer step."""

from offbeat.parameters.adasum.adasum_update import AdasumUpdate
from offbeat.parameters.average import Average
from offbeat.parameters.pair_average.pair_average import PairAverage
from offbeat.parameters.push_sum.push_sum import PushSum
from offbeat.parameters.stale_average.stale_average import StaleAverage
from offbeat.schedule import Cycle

__all__ = ["AdasumUpdate", "Average", "Cycle", "PairAverage", "PushSum", "StaleAverage"]
