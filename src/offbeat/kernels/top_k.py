"""The k largest entries in one reading pass: machine code for the CPU, with numba."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offbeat.kernels.compile import Array, compiled

BLOCK = 32  # entries whose largest stands for all of them
DIGIT = 11  # bits that one histogram tells apart
_BITS = {  # integers as wide as a float, and all their bits but the sign
    torch.float32: (torch.int32, np.int32(2**31 - 1)),
    torch.float64: (torch.int64, np.int64(2**63 - 1)),
}


def scanned_top_k(x: Tensor, k: int) -> Tensor:
    """The same entries as :func:`offbeat.functional.top_k` finds, but for ties, sooner.

    Magnitudes are compared by their bits as integers, among which NaN is larger than infinity. The
    k blocks of 32 with the largest maxima hold k of the k largest entries, so that a second look
    goes only to blocks that reach the k-th largest maximum; the k-th largest of many is found by
    histograms of 11 bits. Float32 and float64 on a CPU, one reading pass. Extra memory: d/32
    entries, and those that reach that maximum.

    >>> scanned_top_k(torch.tensor([1.0, -3.0, 0.0, 2.0]), 2)
    tensor([1, 3])
    """
    integers, magnitude = _BITS[x.dtype]
    return torch.from_numpy(_largest(x.detach().view(integers).numpy(), k, magnitude))


def scanned_blocks(x: Tensor, blocks: Sequence[tuple[int, int, int]]) -> Tensor:
    """The entries that :func:`scanned_top_k` finds in each ``x[start:end]``, by one call.

    ``blocks`` are (start, end, k), of any number; returns places in ``x``, block after block. What
    calls from Python cost small layers, 10 us each, is paid once.

    >>> scanned_blocks(torch.tensor([1.0, -3.0, 0.0, 2.0]), [(0, 2, 1), (2, 4, 1)])
    tensor([1, 3])
    """
    integers, magnitude = _BITS[x.dtype]
    bits = x.detach().view(integers).numpy()
    return torch.from_numpy(_of_each(bits, np.array(blocks, np.int64), magnitude))


@compiled
def _of_each(bits: Array, blocks: Array, magnitude: Any) -> Array:
    """Places of the ``k`` largest between ``start`` and ``end``, for each row of ``blocks``."""
    places = np.empty(blocks[:, 2].sum(), np.int64)
    count = 0
    for start, end, k in blocks:
        places[count : count + k] = start + _largest(bits[start:end], k, magnitude)
        count += k
    return places


@compiled
def _largest(bits: Array, k: int, magnitude: Any) -> Array:
    """Places of the ``k`` largest of ``bits & magnitude``."""
    if 2 * k * BLOCK > bits.size:
        return _choose(bits & magnitude, np.arange(bits.size), k)
    maxima = _maxima(bits, magnitude)
    # Not zeros: of an embedding most rows have no gradient, and all of them would be candidates.
    least = max(_kth(maxima, k), 1)
    blocks = np.flatnonzero(maxima >= least)
    places = np.empty(max(k, blocks.size * BLOCK), np.int64)
    count = 0
    for block in blocks:
        for at in range(block * BLOCK, min(bits.size, (block + 1) * BLOCK)):
            if bits[at] & magnitude >= least:
                places[count] = at
                count += 1
    if count < k:
        return _with_zeros(bits, magnitude, places, count, k)
    return _choose(bits[places[:count]] & magnitude, places[:count], k)


@compiled
def _with_zeros(bits: Array, magnitude: Any, places: Array, count: int, k: int) -> Array:
    """The first ``count`` of ``places``, and of zeros as many as make ``k``."""
    for at in range(bits.size):
        if count == k:
            break
        if bits[at] & magnitude == 0:
            places[count] = at
            count += 1
    return places[:k]


@compiled
def _maxima(bits: Array, magnitude: Any) -> Array:
    """The largest magnitude of every block; the last one may be short."""
    found = np.zeros((bits.size + BLOCK - 1) // BLOCK, bits.dtype)
    whole = bits.size // BLOCK
    # Rows of a length that the compiler does not know: of 32 it would unroll the loop before it
    # could use vector instructions, and be seven times slower.
    even = bits[: whole * BLOCK]
    rows = even.reshape(whole, even.size // whole)
    for block in range(whole):
        largest = found[block]
        for at in range(rows.shape[1]):
            largest = max(largest, rows[block, at] & magnitude)
        found[block] = largest
    for at in range(whole * BLOCK, bits.size):
        found[whole] = max(found[whole], bits[at] & magnitude)
    return found


@compiled
def _kth(values: Array, k: int) -> int:
    """The ``k``-th largest of integers that are not negative."""
    if k == 1:
        return int(values.max())
    shift = values.itemsize * 8 - 1
    known = 0  # its leading bits
    while shift > 0:
        width = min(DIGIT, shift)
        shift -= width
        counts = np.zeros(1 << width, np.int64)
        for value in values:
            if value >> (shift + width) == known:
                counts[(value >> shift) & ((1 << width) - 1)] += 1
        digit = (1 << width) - 1
        while counts[digit] < k:
            k -= counts[digit]
            digit -= 1
        known = known << width | digit
    return known


@compiled
def _choose(values: Array, places: Array, k: int) -> Array:
    """Of ``places`` those with the ``k`` largest ``values``; of equal ones any."""
    least = _kth(values, k)
    chosen = np.empty(k, np.int64)
    count, last = 0, k  # larger ones come in from the front, equal ones from the back
    for value, place in zip(values, places):  # noqa: B905 - numba knows no strict
        if value > least:
            chosen[count] = place
            count += 1
        elif value == least and last > count:
            last -= 1
            chosen[last] = place
    return chosen
