"""Adasum's two passes over the vectors of all ranks in machine code, for the CPU, with numba."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offbeat.functional.adasum import combine as torch_combine
from offbeat.functional.adasum import gram as torch_gram
from offbeat.functional.compiled import Array, array_of, compiled, inlined
from offbeat.functional.packing import Span

BLOCK = 256  # elements of a row in float64 at a time: those of eight rows fit half a core's cache
_HALF = np.uint32(16)


def gram(rows: Tensor, spans: Sequence[Span], out: Tensor) -> None:
    """What :func:`offbeat.functional.gram` does, each product of a pair once.

    Of contiguous float32, float64 and bfloat16; all else is left to torch. The two agree up to
    the order of the sums.

    >>> out = torch.zeros(1, 2, 2, dtype=torch.float64)
    >>> gram(torch.tensor([[1.0, 0.0], [1.0, 1.0]]), [Span(0, 0, 2)], out)
    >>> out.tolist()
    [[[1.0, 1.0], [1.0, 2.0]]]
    """
    if not _fit(rows):
        return torch_gram(rows, spans, out)
    block = np.empty((len(rows), BLOCK))
    run = _gram_16 if rows.dtype == torch.bfloat16 else _gram
    run(array_of(rows), _table(spans), out.numpy(), block)


def combine(rows: Tensor, spans: Sequence[Span], weights: Tensor, out: Tensor) -> None:
    """What :func:`offbeat.functional.combine` does, where :func:`gram` needs no torch either.

    >>> out = torch.zeros(1)
    >>> combine(torch.tensor([[1.0], [2.0]]), [Span(0, 0, 1)], torch.tensor([[3.0, 0.5]]), out)
    >>> out
    tensor([4.])
    """
    if not _fit(rows) or out.dtype not in (torch.float32, torch.float64):
        return torch_combine(rows, spans, weights, out)
    run = _combine_16 if rows.dtype == torch.bfloat16 else _combine
    run(array_of(rows), _table(spans), weights.double().numpy(), out.numpy(), np.empty(BLOCK))


def _fit(rows: Tensor) -> bool:
    known = rows.dtype in (torch.float32, torch.float64, torch.bfloat16)
    return known and rows.is_contiguous()


def _table(spans: Sequence[Span]) -> Array:
    return np.array([(s.layer, s.start, s.stop) for s in spans], np.int64).reshape(-1, 3)


@compiled
def _gram(rows: Array, spans: Array, out: Array, block: Array) -> None:
    for s in range(len(spans)):
        layer, first, stop = spans[s]
        for start in range(first, stop, BLOCK):
            count = min(BLOCK, stop - start)
            for i in range(len(rows)):
                for k in range(count):
                    block[i, k] = rows[i, start + k]
            _add_products(block, count, out[layer])


@compiled
def _gram_16(rows: Array, spans: Array, out: Array, block: Array) -> None:
    for s in range(len(spans)):
        layer, first, stop = spans[s]
        for start in range(first, stop, BLOCK):
            count = min(BLOCK, stop - start)
            for i in range(len(rows)):
                for k in range(count):
                    block[i, k] = _widened(rows[i, start + k])
            _add_products(block, count, out[layer])


@inlined
def _widened(bits: Any) -> Any:
    return np.uint32(np.uint32(bits) << _HALF).view(np.float32)


@inlined
def _add_products(block: Array, count: int, out: Array) -> None:
    for i in range(len(out)):
        for j in range(i + 1):
            total = 0.0
            for k in range(count):
                total += block[i, k] * block[j, k]
            out[i, j] += total
            if i != j:
                out[j, i] += total


@compiled
def _combine(rows: Array, spans: Array, weights: Array, out: Array, block: Array) -> None:
    for s in range(len(spans)):
        layer, first, stop = spans[s]
        for start in range(first, stop, BLOCK):
            count = min(BLOCK, stop - start)
            block[:count] = 0
            for i in range(len(rows)):
                weight = weights[layer, i]
                for k in range(count):
                    block[k] += weight * rows[i, start + k]
            for k in range(count):
                out[start + k] = block[k]


@compiled
def _combine_16(rows: Array, spans: Array, weights: Array, out: Array, block: Array) -> None:
    for s in range(len(spans)):
        layer, first, stop = spans[s]
        for start in range(first, stop, BLOCK):
            count = min(BLOCK, stop - start)
            block[:count] = 0
            for i in range(len(rows)):
                weight = weights[layer, i]
                for k in range(count):
                    block[k] += weight * _widened(rows[i, start + k])
            for k in range(count):
                out[start + k] = block[k]
