"""Floor 1: pure mathematics on tensors, without groups, state or device logic."""

from offbeat.functional.adasum import (
    adasum,
    coefficients,
    combine,
    gram,
    orthogonality,
    pair_coefficients,
    tree,
)
from offbeat.functional.packing import Layout, Span, pack, partition
from offbeat.functional.push_sum import de_bias, mix, numerator
from offbeat.functional.sketch import sketch, spread

__all__ = [
    "Layout",
    "Span",
    "adasum",
    "coefficients",
    "combine",
    "de_bias",
    "gram",
    "mix",
    "numerator",
    "orthogonality",
    "pack",
    "pair_coefficients",
    "partition",
    "sketch",
    "spread",
    "tree",
]
