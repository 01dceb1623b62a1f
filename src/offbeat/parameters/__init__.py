"""Floor 3: what fills the parameters slot, one final class a file."""

from offbeat.parameters.adasum_update import AdasumUpdate
from offbeat.parameters.average import Average
from offbeat.parameters.cycle import Cycle
from offbeat.parameters.pair_average import PairAverage
from offbeat.parameters.push_sum import PushSum
from offbeat.parameters.stale_average import StaleAverage

__all__ = ["AdasumUpdate", "Average", "Cycle", "PairAverage", "PushSum", "StaleAverage"]
