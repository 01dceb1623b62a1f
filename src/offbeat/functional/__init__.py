"""Equations: pure functions of tensors, without process groups, state or choice of device."""

from offbeat.functional.adam import adam_step_size, masked_adam, touched
from offbeat.functional.adasum import (
    GramAnalysis,
    adasum,
    add_gram,
    analyze,
    coefficients,
    combine_rows,
    orthogonality,
    pair_coefficients,
    tree,
)
from offbeat.functional.clipping import clip_factor
from offbeat.functional.cost import (
    LinkCost,
    adaptive_ratio,
    exposed_seconds,
    is_cheaper_dense,
    max_speedup,
    speedup,
    warm_density,
)
from offbeat.functional.finite import all_finite
from offbeat.functional.halving import Cell, Merge, cells_of, merges
from offbeat.functional.messages.narrowing import narrow, narrow_bytes, widen
from offbeat.functional.messages.sparse_messages import (
    SparseFormat,
    add_sparse,
    chunks_of,
    fill_sparse,
)
from offbeat.functional.outer import blend, divide_layers, layer_of, pseudo_gradient
from offbeat.functional.packing import (
    Layout,
    Segment,
    Segments,
    accumulation_dtype,
    balance,
    cache_blocks,
    clip_segments,
    flat_view,
    pack,
    runs_within,
)
from offbeat.functional.pair_average import add_half_difference, apply_delta, take_snapshot
from offbeat.functional.push_sum import (
    add_messages,
    add_update,
    debias,
    fill_and_add,
    fill_messages,
    numerator,
    sum_messages,
)
from offbeat.functional.sketch import distances_to_mean, sketch
from offbeat.functional.stale_average import (
    cast_difference,
    merge_exact_sum,
    merge_stale_sum,
    progress,
)
from offbeat.functional.top_k import count_kept, delta, extract, sampled_top_k, top_k

__all__ = [
    "Cell",
    "GramAnalysis",
    "Layout",
    "LinkCost",
    "Merge",
    "Segment",
    "Segments",
    "SparseFormat",
    "accumulation_dtype",
    "adam_step_size",
    "adaptive_ratio",
    "adasum",
    "add_gram",
    "add_half_difference",
    "add_messages",
    "add_sparse",
    "add_update",
    "all_finite",
    "analyze",
    "apply_delta",
    "balance",
    "blend",
    "cache_blocks",
    "cast_difference",
    "cells_of",
    "chunks_of",
    "clip_factor",
    "clip_segments",
    "coefficients",
    "combine_rows",
    "count_kept",
    "debias",
    "delta",
    "distances_to_mean",
    "divide_layers",
    "exposed_seconds",
    "extract",
    "fill_and_add",
    "fill_messages",
    "fill_sparse",
    "flat_view",
    "is_cheaper_dense",
    "layer_of",
    "masked_adam",
    "max_speedup",
    "merge_exact_sum",
    "merge_stale_sum",
    "merges",
    "narrow",
    "narrow_bytes",
    "numerator",
    "orthogonality",
    "pack",
    "pair_coefficients",
    "progress",
    "pseudo_gradient",
    "runs_within",
    "sampled_top_k",
    "sketch",
    "speedup",
    "sum_messages",
    "take_snapshot",
    "top_k",
    "touched",
    "tree",
    "warm_density",
    "widen",
]
