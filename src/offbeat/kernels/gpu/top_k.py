"""Selection of the k largest magnitudes of every layer on a GPU, for all layers at once.

As on a CPU (:mod:`offbeat.kernels.top_k`): one pass takes the maximum of each group of 32, a
histogram of these gives a lower bound of the k-th largest value, and only groups that reach it are
read again. Histograms of 12 bits then find the value exactly. Counts are integers, so that the
order of atomic additions changes nothing, and places follow from prefix sums: the same entries are
selected in every run. The host learns no value.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from offbeat.kernels.blocks import Blocks, blocks_of
from offbeat.kernels.gpu.launch import SIZE, launch

GROUP = 32  # entries that share one maximum
GROUPS = SIZE // GROUP
DIGIT = 12  # bits that one histogram resolves
BINS = 1 << DIGIT
TOP = 31 - DIGIT  # where the first digit begins; bits 0 to 30 are the magnitude
MAGNITUDE = tl.constexpr(0x7FFFFFFF)

Block = tuple[int, int, int]  # start, stop, k


class LaunchPlan(NamedTuple):
    """Blocks of layers, and for each layer how many are selected and where they are written."""

    blocks: Blocks
    ks: Tensor
    starts: Tensor
    total: int


def top_k_of_blocks(x: Tensor, blocks: Sequence[Block]) -> Tensor:
    """Return the indices of the k largest magnitudes of each block of ``x`` (d,) in float32.

    ``blocks`` are (start, stop, k). The entries are those of :func:`offbeat.functional.top_k`;
    of ties the first ones. Twenty launches for any number of blocks, of which one reads all of
    ``x``. Memory: d/32 entries, and 4096 for each block.
    """
    plan = _plan(tuple(block for block in blocks if block[1] > block[0]), x.device)
    table, layers = plan.blocks.rows, len(plan.ks)
    count, aligned = len(table), plan.blocks.aligned
    maxima, tallies = (table.new_empty(n, dtype=torch.int32) for n in (count * GROUPS, 2 * count))
    counts, known = (table.new_zeros(n, dtype=torch.int32) for n in (layers * BINS, layers))
    left = plan.ks.clone()
    launch(_maxima, count, table, x, maxima, counts, TOP, BINS, aligned, GROUPS, GROUP)
    launch(_descend, layers, counts, known, left, DIGIT, BINS)
    # At least 1: most rows of an embedding have no gradient, and all would be read again.
    least = known.bitwise_left_shift(TOP).clamp_(min=1)
    known.zero_()
    left.copy_(plan.ks)
    for shift, width in ((TOP, DIGIT), (TOP - DIGIT, DIGIT), (0, TOP - DIGIT)):
        read = x, maxima, least, known
        launch(_digits, count, table, *read, counts, shift, width, BINS, aligned, GROUPS, GROUP)
        launch(_descend, layers, counts, known, left, width, BINS)
    launch(_tally, count, table, x, maxima, known, tallies, aligned, GROUPS, GROUP)
    before = tallies.view(-1, 2).cumsum(0, dtype=torch.int32) - tallies.view(-1, 2)
    indices = table.new_empty(plan.total)
    launch(
        _place, count, table, plan.blocks.runs, x, maxima, known, left, before,
        plan.ks, plan.starts, indices, aligned, GROUPS, GROUP,
    )  # fmt: skip
    return indices


@lru_cache(maxsize=64)
def _plan(blocks: tuple[Block, ...], device: torch.device) -> LaunchPlan:
    spans = np.array([(i, start, stop) for i, (start, stop, _) in enumerate(blocks)], np.int64)
    ks = torch.tensor([k for *_, k in blocks], dtype=torch.int32, device="cpu")
    starts = ks.cumsum(0, dtype=torch.int64) - ks
    return LaunchPlan(
        blocks_of(spans, SIZE, device), ks.to(device), starts.to(device), int(ks.sum())
    )


@triton.jit
def _magnitudes(x: tl.tensor, at: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Return magnitudes as integers, which are in the same order; NaN is larger than infinity."""
    return tl.load(x + at, mask=inside, other=0.0).to(tl.int32, bitcast=True) & MAGNITUDE


@triton.jit
def _in_groups(
    rows: tl.tensor, aligned: tl.constexpr, groups: tl.constexpr, group: tl.constexpr
) -> tl.tuple:
    row = rows + 3 * tl.program_id(0)
    layer, start, stop = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    if aligned:
        start, stop = tl.multiple_of(start, 8), tl.multiple_of(stop, 8)
    at = start + tl.arange(0, groups)[:, None] * group + tl.arange(0, group)[None, :]
    return layer, at, at < stop


@triton.jit
def _reaching(
    x: tl.tensor, at: tl.tensor, inside: tl.tensor, maxima: tl.tensor, bound: tl.tensor
) -> tl.tuple:
    """Read only the groups whose maximum reaches ``bound``."""
    groups: tl.constexpr = at.shape[0]
    place = tl.program_id(0).to(tl.int64) * groups + tl.arange(0, groups)
    inside = inside & (tl.load(maxima + place) >= bound)[:, None]
    return _magnitudes(x, at, inside), inside


@triton.jit
def _maxima(
    rows: tl.tensor, x: tl.tensor, maxima: tl.tensor, counts: tl.tensor,
    shift: tl.constexpr, bins: tl.constexpr,
    aligned: tl.constexpr, groups: tl.constexpr, group: tl.constexpr,
) -> None:  # fmt: skip
    layer, at, inside = _in_groups(rows, aligned, groups, group)
    largest = tl.max(_magnitudes(x, at, inside), 1)
    tl.store(maxima + tl.program_id(0).to(tl.int64) * groups + tl.arange(0, groups), largest)
    tl.atomic_add(counts + layer * bins + (largest >> shift), 1, largest > 0, sem="relaxed")


@triton.jit
def _digits(
    rows: tl.tensor, x: tl.tensor, maxima: tl.tensor, least: tl.tensor, known: tl.tensor,
    counts: tl.tensor, shift: tl.constexpr, width: tl.constexpr, bins: tl.constexpr,
    aligned: tl.constexpr, groups: tl.constexpr, group: tl.constexpr,
) -> None:  # fmt: skip
    """Count the next digit of all values that begin with the known ones."""
    layer, at, inside = _in_groups(rows, aligned, groups, group)
    bound = tl.load(least + layer)
    bits, _ = _reaching(x, at, inside, maxima, bound)
    counted = (bits >= bound) & ((bits >> (shift + width)) == tl.load(known + layer))
    digit = (bits >> shift) & ((1 << width) - 1)
    tl.atomic_add(counts + layer * bins + digit, 1, counted, sem="relaxed")


@triton.jit
def _descend(
    counts: tl.tensor, known: tl.tensor, left: tl.tensor, width: tl.constexpr, bins: tl.constexpr
) -> None:
    """Append the digit of the k-th largest value, and clear the counts.

    ``left`` is k less the number of values whose known digits are larger. If there are fewer
    values than that, only zeros are left, and the digit is 0.
    """
    layer = tl.program_id(0)
    place = counts + layer.to(tl.int64) * bins + tl.arange(0, bins)
    count = tl.load(place)
    tl.store(place, tl.zeros([bins], tl.int32))
    above = tl.sum(count, 0) - tl.cumsum(count, 0)  # values with a larger digit
    wanted = tl.load(left + layer)
    # Larger digits have fewer values above them: the digit is the first with less than wanted.
    digit = tl.sum((above >= wanted).to(tl.int32), 0)
    larger = tl.sum(tl.where(tl.arange(0, bins) > digit, count, 0), 0)
    tl.store(left + layer, wanted - larger)
    tl.store(known + layer, (tl.load(known + layer) << width) | digit)


@triton.jit
def _tally(
    rows: tl.tensor, x: tl.tensor, maxima: tl.tensor, known: tl.tensor, tallies: tl.tensor,
    aligned: tl.constexpr, groups: tl.constexpr, group: tl.constexpr,
) -> None:  # fmt: skip
    """Count the values of each block that are larger than the k-th, and those that equal it."""
    layer, at, inside = _in_groups(rows, aligned, groups, group)
    threshold = tl.load(known + layer)
    program = tl.program_id(0).to(tl.int64)
    bits, inside = _reaching(x, at, inside, maxima, threshold)
    larger = tl.sum(tl.sum((inside & (bits > threshold)).to(tl.int32), 1), 0)
    equal = tl.sum(tl.sum((inside & (bits == threshold)).to(tl.int32), 1), 0)
    tl.store(tallies + 2 * program, larger)
    tl.store(tallies + 2 * program + 1, equal)


@triton.jit
def _place(
    rows: tl.tensor, runs: tl.tensor, x: tl.tensor, maxima: tl.tensor, known: tl.tensor,
    left: tl.tensor, before: tl.tensor, ks: tl.tensor, starts: tl.tensor, indices: tl.tensor,
    aligned: tl.constexpr, groups: tl.constexpr, group: tl.constexpr,
) -> None:  # fmt: skip
    """Write the indices of larger values, and behind them those of as many equal ones as fit."""
    layer, at, inside = _in_groups(rows, aligned, groups, group)
    threshold, ties = tl.load(known + layer), tl.load(left + layer)
    bits, inside = _reaching(x, at, inside, maxima, threshold)
    size: tl.constexpr = groups * group
    at, bits = tl.reshape(at, (size,)), tl.reshape(bits, (size,))
    inside = tl.reshape(inside, (size,))
    here, first = before + 2 * tl.program_id(0), before + 2 * tl.load(runs + 3 * layer + 1)
    larger, equal = inside & (bits > threshold), inside & (bits == threshold)
    rank = tl.load(here) - tl.load(first) + tl.cumsum(larger.to(tl.int32), 0) - 1
    tie = tl.load(here + 1) - tl.load(first + 1) + tl.cumsum(equal.to(tl.int32), 0) - 1
    into = indices + tl.load(starts + layer)
    tl.store(into + rank, at, mask=larger)
    tl.store(into + tl.load(ks + layer) - ties + tie, at, mask=equal & (tie < ties))
