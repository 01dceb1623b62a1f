"""Adasum's passes over the vectors of all ranks, on the CPU, compiled by numba."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from offbeat.functional.adasum import GramAnalysis, factor, follow_tree, gram_tree
from offbeat.functional.adasum import add_gram as torch_gram
from offbeat.functional.adasum import combine_rows as torch_combine
from offbeat.functional.packing import Segment, Segments
from offbeat.kernels.compile import Array, admit, compiled, inlined
from offbeat.kernels.sixteen_bits import array_of, widened

BLOCK = 256  # elements of a row in float64 at a time: blocks of eight rows fit half a core's cache


def add_gram(rows: Tensor, spans: Sequence[Segment], out: Tensor) -> None:
    """Add the inner products of all pairs of rows, as :func:`offbeat.functional.add_gram` does.

    The product of a pair is computed once. The kernel runs for contiguous ``rows`` (P, m) of
    float32, float64, bfloat16 or float16; other inputs are passed to the torch implementation. The
    two agree up to the order of the sums.

    >>> out = torch.zeros(1, 2, 2, dtype=torch.float64)
    >>> add_gram(torch.tensor([[1.0, 0.0], [1.0, 1.0]]), [Segment(0, 0, 2)], out)
    >>> out.tolist()
    [[[1.0, 1.0], [1.0, 2.0]]]
    """
    if not _fit(rows):
        return torch_gram(rows, spans, out)
    block = np.empty((len(rows), BLOCK))
    _gram(array_of(rows), _table(spans), out.numpy(), block)


def combine_rows(rows: Tensor, spans: Sequence[Segment], weights: Tensor, out: Tensor) -> None:
    """Write the weighted sum of the rows, as :func:`offbeat.functional.combine_rows` does.

    The kernel runs for the ``rows`` of :func:`add_gram` and ``out`` (m,) of float32 or float64;
    other inputs are passed to the torch implementation.

    >>> out = torch.zeros(1)
    >>> combine_rows(
    ...     torch.tensor([[1.0], [2.0]]), [Segment(0, 0, 1)], torch.tensor([[3.0, 0.5]]), out
    ... )
    >>> out
    tensor([4.])
    """
    if not _fit(rows) or out.dtype not in (torch.float32, torch.float64):
        return torch_combine(rows, spans, weights, out)
    _combine(array_of(rows), _table(spans), weights.double().numpy(), out.numpy(), np.empty(BLOCK))


def analyze(products: Tensor) -> GramAnalysis:
    """Compute coefficients and measures, as :func:`offbeat.functional.analyze` does.

    ``products`` is (layers, P, P) in float64. The kernel is the same function, compiled; the two
    agree up to rounding.

    >>> analyze(torch.eye(2, dtype=torch.float64)[None]).weights
    tensor([[1., 1.]], dtype=torch.float64)
    """
    # NumPy arrays: just after a wait, an operation of torch takes 20 us.
    found = follow_tree(_gram_tree, products.numpy(), np.zeros)
    return GramAnalysis(*map(torch.from_numpy, found))


def _fit(rows: Tensor) -> bool:
    known = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    return rows.dtype in known and rows.is_contiguous()


def _table(spans: Sequence[Segment]) -> Array:
    if isinstance(spans, Segments):
        return spans.table
    return Segments(spans).table


# Kernels loop over slices instead of indices into whole arrays: the compiler cannot know that such
# an index is not negative, which numba counts from the end, and would not vectorize the loop.


@compiled
def _gram(rows: Array, spans: Array, out: Array, block: Array) -> None:
    for s in range(len(spans)):
        layer, first, stop = spans[s]
        for start in range(first, stop, BLOCK):
            count = min(BLOCK, stop - start)
            for i in range(len(rows)):
                row, wide = rows[i, start : start + count], block[i, :count]
                for k in range(count):
                    wide[k] = widened(row[k])
            _add_products(block, count, out[layer])


@inlined
def _add_products(block: Array, count: int, out: Array) -> None:
    for i in range(len(out)):
        for j in range(i + 1):
            a, b = block[i, :count], block[j, :count]
            total = 0.0
            for k in range(count):
                total += a[k] * b[k]
            out[i, j] += total
            if i != j:
                out[j, i] += total


@compiled
def _combine(rows: Array, spans: Array, weights: Array, out: Array, block: Array) -> None:
    for s in range(len(spans)):
        layer, first, stop = spans[s]
        for start in range(first, stop, BLOCK):
            count = min(BLOCK, stop - start)
            total, to = block[:count], out[start : start + count]
            total[:] = 0
            for i in range(len(rows)):
                weight, row = weights[layer, i], rows[i, start : start + count]
                for k in range(count):
                    total[k] += weight * widened(row[k])
            for k in range(count):
                to[k] = total[k]


admit(factor)
_gram_tree = compiled(gram_tree)
