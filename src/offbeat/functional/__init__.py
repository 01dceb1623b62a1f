"""Floor 1: pure mathematics on tensors, without groups, state or device logic."""

from offbeat.functional.packing import Layout, pack, partition
from offbeat.functional.push_sum import de_bias, mix, numerator
from offbeat.functional.sketch import sketch, spread

__all__ = ["Layout", "de_bias", "mix", "numerator", "pack", "partition", "sketch", "spread"]
