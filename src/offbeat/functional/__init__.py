"""Floor 1: pure mathematics on tensors, without groups, state or device logic."""

from offbeat.functional.cost import (
    Wire,
    adaptive_ratio,
    is_cheaper_dense,
    max_speedup,
    speedup,
    warm_density,
)
from offbeat.functional.packing import Layout, pack, partition
from offbeat.functional.push_sum import de_bias, mix, numerator
from offbeat.functional.sketch import sketch, spread
from offbeat.functional.sparsify import delta, kept, sampled_top_k, take, top_k

__all__ = [
    "Layout",
    "Wire",
    "adaptive_ratio",
    "de_bias",
    "delta",
    "is_cheaper_dense",
    "kept",
    "max_speedup",
    "mix",
    "numerator",
    "pack",
    "partition",
    "sampled_top_k",
    "sketch",
    "speedup",
    "spread",
    "take",
    "top_k",
    "warm_density",
]
