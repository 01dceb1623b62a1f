"""Floor 1: pure mathematics on tensors, without groups, state or device logic."""

from offbeat.functional.adam import adam_step_size, masked_adam, touched
from offbeat.functional.packing import Layout, pack, partition
from offbeat.functional.push_sum import de_bias, mix, numerator
from offbeat.functional.sketch import sketch, spread

__all__ = [
    "Layout",
    "adam_step_size",
    "de_bias",
    "masked_adam",
    "mix",
    "numerator",
    "pack",
    "partition",
    "sketch",
    "spread",
    "touched",
]
