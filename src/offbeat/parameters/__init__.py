"""Floor 3: what fills the parameters slot, one final class a file."""

from offbeat.parameters.adasum_update import AdasumUpdate
from offbeat.parameters.average import Average
from offbeat.parameters.push_sum import PushSum

__all__ = ["AdasumUpdate", "Average", "PushSum"]
