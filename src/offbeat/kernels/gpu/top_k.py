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
    of ties the first ones. Twelve launches for any number of blocks, of which one reads all of
    ``x``. Memory: d/32 entries, and 4096 for each block.
    """
    plan = _plan(tuple(block for block in blocks if block[1] > block[0]), x.device)
    table, layers = plan.blocks.rows, len(plan.ks)
    count, aligned = len(table), plan.blocks.aligned
    maxima, tallies = (table.new_empty(n, dtype=torch.int32) for n in (count * GROUPS, 2 * count))
    counts = table.new_zeros(layers * BINS, dtype=torch.int32)
    least, known, left = table.new_empty(3, layers, dtype=torch.int32)
    launch(_maxima, count, table, x, maxima, counts, TOP, BINS, aligned, GROUPS, GROUP)
    launch(_bound, layers, counts, plan.ks, least, known, left, TOP, BINS)
    for shift, width in ((TOP, DIGIT), (TOP - DIGIT, DIGIT), (0, TOP - DIGIT)):
        read = x, maxima, least, known
        launch(_digits, count, table, *read, counts, shift, width, BINS, aligned, GROUPS, GROUP)
        launch(_descend, layers, counts, known, left, width, BINS)
    launch(_tally, count, table, x, maxima, known, tallies, aligned, GROUPS, GROUP)
    sums = tallies.cumsum(0, dtype=torch.int32)
    indices = table.new_empty(plan.total)
    launch(
        _place, count, table, plan.blocks.runs, x, maxima, known, left, sums,
        plan.ks, plan.starts, indices, aligned, GROUPS, GROUP,
    )  # fmt: skip
    return indices


@lru_cache(maxsize=64)
def _plan(layers: tuple[Block, ...], device: torch.device) -> LaunchPlan:
    spans = np.array([(i, start, stop) for i, (start, stop, _) in enumerate(layers)], np.int64)
    ks = torch.tensor([k for *_, k in layers], dtype=torch.int32, device="cpu")
    starts = ks.cumsum(0, dtype=torch.int64) - ks
    blocks = blocks_of(spans, SIZE, device)
    return LaunchPlan(blocks, ks.to(device), starts.to(device), int(ks.sum()))


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
def _digit_of(counts: tl.tensor, wanted: tl.tensor, bins: tl.constexpr) -> tl.tuple:
    """Return the digit of the value that ``wanted`` - 1 are above, and how many digits are larger.

    Clears the counts of this program's layer. If there are fewer values, only zeros are left, and
    the digit is 0.
    """
    place = counts + tl.program_id(0).to(tl.int64) * bins + tl.arange(0, bins)
    count = tl.load(place)
    tl.store(place, tl.zeros([bins], tl.int32))
    above = tl.sum(count, 0) - tl.cumsum(count, 0)  # values with a larger digit
    # Larger digits have fewer values above them: the digit is the first with less than wanted.
    digit = tl.sum((above >= wanted).to(tl.int32), 0)
    return digit, tl.sum(tl.where(tl.arange(0, bins) > digit, count, 0), 0)


@triton.jit
def _bound(
    counts: tl.tensor, ks: tl.tensor, least: tl.tensor, known: tl.tensor, left: tl.tensor,
    shift: tl.constexpr, bins: tl.constexpr,
) -> None:  # fmt: skip
    """Start the search: a lower bound of the k-th largest value, no known digit, k to be found."""
    layer = tl.program_id(0)
    wanted = tl.load(ks + layer)
    digit, _ = _digit_of(counts, wanted, bins)
    # At least 1: most rows of an embedding have no gradient, and all would be read again.
    tl.store(least + layer, tl.maximum(digit << shift, 1))
    tl.store(known + layer, 0)
    tl.store(left + layer, wanted)


@triton.jit
def _descend(
    counts: tl.tensor, known: tl.tensor, left: tl.tensor, width: tl.constexpr, bins: tl.constexpr
) -> None:
    """Append the digit of the k-th largest value; ``left`` is k less those that are larger."""
    layer = tl.program_id(0)
    wanted = tl.load(left + layer)
    digit, larger = _digit_of(counts, wanted, bins)
    tl.store(left + layer, wanted - larger)
    tl.store(known + layer, (tl.load(known + layer) << width) | digit)


@triton.jit
def _tally(
    rows: tl.tensor, x: tl.tensor, maxima: tl.tensor, known: tl.tensor, tallies: tl.tensor,
    aligned: tl.constexpr, groups: tl.constexpr, group: tl.constexpr,
) -> None:  # fmt: skip
    """Count the values of each block that are larger than the k-th, then those that equal it.

    The counts of all blocks lie in one row, so that one scan adds up both: torch scans a matrix of
    two columns a hundred times slower.
    """
    layer, at, inside = _in_groups(rows, aligned, groups, group)
    threshold = tl.load(known + layer)
    program = tl.program_id(0).to(tl.int64)
    bits, inside = _reaching(x, at, inside, maxima, threshold)
    larger = tl.sum(tl.sum((inside & (bits > threshold)).to(tl.int32), 1), 0)
    equal = tl.sum(tl.sum((inside & (bits == threshold)).to(tl.int32), 1), 0)
    tl.store(tallies + program, larger)
    tl.store(tallies + tl.num_programs(0) + program, equal)


@triton.jit
def _place(
    rows: tl.tensor, runs: tl.tensor, x: tl.tensor, maxima: tl.tensor, known: tl.tensor,
    left: tl.tensor, sums: tl.tensor, ks: tl.tensor, starts: tl.tensor, indices: tl.tensor,
    aligned: tl.constexpr, groups: tl.constexpr, group: tl.constexpr,
) -> None:  # fmt: skip
    """Write the indices of larger values, and behind them those of as many equal ones as fit."""
    layer, at, inside = _in_groups(rows, aligned, groups, group)
    threshold, ties = tl.load(known + layer), tl.load(left + layer)
    bits, inside = _reaching(x, at, inside, maxima, threshold)
    size: tl.constexpr = groups * group
    at, bits = tl.reshape(at, (size,)), tl.reshape(bits, (size,))
    inside = tl.reshape(inside, (size,))
    larger, equal = inside & (bits > threshold), inside & (bits == threshold)
    first = tl.load(runs + 3 * layer + 1)
    both = tl.cumsum(larger.to(tl.int32) + (equal.to(tl.int32) << 16), 0)  # one scan, two counts
    rank = _before(sums, 0, first) + (both & 0xFFFF) - 1
    tie = _before(sums, tl.num_programs(0), first) + (both >> 16) - 1
    into = indices + tl.load(starts + layer)
    tl.store(into + rank, at, mask=larger)
    tl.store(into + tl.load(ks + layer) - ties + tie, at, mask=equal & (tie < ties))


@triton.jit
def _before(sums: tl.tensor, part: tl.tensor, first: tl.tensor) -> tl.tensor:
    """Return how many the blocks from ``first`` up to this program's have, in a part of the row."""
    here, start = part + tl.program_id(0), part + first
    sum_here = tl.load(sums + here - 1, mask=here > 0, other=0)
    return sum_here - tl.load(sums + start - 1, mask=start > 0, other=0)
