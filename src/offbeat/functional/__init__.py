"""Floor 1: pure mathematics on tensors, without groups, state or device logic."""

from offbeat.functional.adam import adam_step_size, masked_adam, touched
from offbeat.functional.adasum import (
    adasum,
    coefficients,
    combine,
    gram,
    orthogonality,
    pair_coefficients,
    tree,
)
from offbeat.functional.cost import (
    Wire,
    adaptive_ratio,
    is_cheaper_dense,
    max_speedup,
    speedup,
    warm_density,
)
from offbeat.functional.packing import (
    Layout,
    Span,
    balance,
    blocks,
    memory,
    pack,
    partition,
    wide,
)
from offbeat.functional.pair_average import absorb, meet, shoot
from offbeat.functional.push_sum import (
    Passes,
    drift,
    numerator,
    passes,
    share_out,
    take_in,
    total,
)
from offbeat.functional.sketch import sketch, spread
from offbeat.functional.sparsify import (
    block_selection,
    delta,
    kept,
    sampled_top_k,
    selection,
    take,
    top_k,
)
from offbeat.functional.stale_average import merge, narrow

__all__ = [
    "Layout",
    "Passes",
    "Span",
    "Wire",
    "absorb",
    "adam_step_size",
    "adaptive_ratio",
    "adasum",
    "balance",
    "block_selection",
    "blocks",
    "coefficients",
    "combine",
    "delta",
    "drift",
    "gram",
    "is_cheaper_dense",
    "kept",
    "masked_adam",
    "max_speedup",
    "meet",
    "memory",
    "merge",
    "narrow",
    "numerator",
    "orthogonality",
    "pack",
    "pair_coefficients",
    "partition",
    "passes",
    "sampled_top_k",
    "selection",
    "share_out",
    "shoot",
    "sketch",
    "speedup",
    "spread",
    "take",
    "take_in",
    "top_k",
    "total",
    "touched",
    "tree",
    "warm_density",
    "wide",
]
