"""Floor 1: pure mathematics on tensors, without groups, state or device logic."""

from offbeat.functional.packing import Layout, blocks, memory, pack, partition, wide
from offbeat.functional.pair_average import absorb, meet, shoot
from offbeat.functional.push_sum import drift, numerator, share_out, take_in, total
from offbeat.functional.sketch import sketch, spread

__all__ = [
    "Layout",
    "absorb",
    "blocks",
    "drift",
    "meet",
    "memory",
    "numerator",
    "pack",
    "partition",
    "share_out",
    "shoot",
    "sketch",
    "spread",
    "take_in",
    "total",
    "wide",
]
