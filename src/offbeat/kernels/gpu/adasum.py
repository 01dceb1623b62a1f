"""Adasum's passes over the vectors of all ranks on a GPU, for all layers in one launch."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from offbeat.functional.adasum import add_gram as torch_gram
from offbeat.functional.adasum import combine_rows as torch_combine
from offbeat.functional.packing import Segment, Segments
from offbeat.kernels.blocks import Blocks, blocks_of
from offbeat.kernels.gpu.launch import DTYPES, SIZE, launch, own_block

SUMS = tl.constexpr(1024)  # blocks whose products a program adds at a time


def add_gram(rows: Tensor, spans: Sequence[Segment], out: Tensor) -> None:
    """Add the inner products of all pairs of rows, as :func:`offbeat.functional.add_gram` does.

    Two launches: the products of each block of 2048 elements, and their sums in a fixed order.
    Atomic additions would need one, but two GPUs would round differently. Extra memory:
    4 P (P + 1) bytes for each block. Rows that are not contiguous are passed to the torch
    implementation.
    """
    if not _fit(rows):
        return torch_gram(rows, spans, out)
    blocks, size = _blocks(rows, spans), len(rows)
    count = len(blocks.rows)
    pairs = size * (size + 1) // 2
    products = torch.empty(pairs, count, dtype=torch.float64, device=rows.device)
    launch(
        _products, count, blocks.rows, rows, products, size, rows.stride(0), count,
        blocks.aligned, SIZE,
    )  # fmt: skip
    programs = len(blocks.runs), size, size
    launch(_sums, programs, blocks.runs, products, out, size, count, SUMS)


def combine_rows(rows: Tensor, spans: Sequence[Segment], weights: Tensor, out: Tensor) -> None:
    """Write the weighted sum of the rows, as :func:`offbeat.functional.combine_rows` does.

    One launch reads and writes each byte once. Rows that are not contiguous are passed to the
    torch implementation.
    """
    if not _fit(rows) or out.dtype not in DTYPES:
        return torch_combine(rows, spans, weights, out)
    blocks, size = _blocks(rows, spans), len(rows)
    launch(
        _combine, len(blocks.rows), blocks.rows, rows, weights.double().contiguous(), out,
        size, rows.stride(0), blocks.aligned, SIZE,
    )  # fmt: skip


def _fit(rows: Tensor) -> bool:
    return rows.dtype in DTYPES and rows.stride(1) == 1


def _blocks(rows: Tensor, spans: Sequence[Segment]) -> Blocks:
    table = spans.table if isinstance(spans, Segments) else Segments(spans).table
    return blocks_of(table, SIZE, rows.device)


@triton.jit
def _products(
    blocks: tl.tensor, rows: tl.tensor, products: tl.tensor,
    ranks: tl.tensor, stride: tl.tensor, count: tl.tensor,
    aligned: tl.constexpr, size: tl.constexpr,
) -> None:  # fmt: skip
    _layer, at, inside = own_block(blocks, aligned, size)
    place, first = products + tl.program_id(0), rows + at
    for i in range(ranks):
        a = tl.load(rows + at, mask=inside, other=0.0).to(tl.float64)
        other = first
        for _ in range(i + 1):  # these rows are in the cache of the processor
            b = tl.load(other, mask=inside, other=0.0).to(tl.float64)
            tl.store(place, tl.sum(a * b, 0))
            place += count
            other += stride
        rows += stride


@triton.jit
def _sums(
    runs: tl.tensor, products: tl.tensor, out: tl.tensor,
    ranks: tl.tensor, count: tl.tensor, width: tl.constexpr,
) -> None:  # fmt: skip
    run, i, j = runs + 3 * tl.program_id(0), tl.program_id(1), tl.program_id(2)
    layer, first, last = tl.load(run), tl.load(run + 1), tl.load(run + 2)
    if j <= i:
        pair = products + (i * (i + 1) // 2 + j).to(tl.int64) * count
        parts = tl.zeros([width], tl.float64)
        for start in range(first, last, width):
            at = start + tl.arange(0, width)
            parts += tl.load(pair + at, mask=at < last, other=0.0)
        matrix = out + layer * ranks * ranks
        total = tl.load(matrix + i * ranks + j) + tl.sum(parts, 0)
        tl.store(matrix + i * ranks + j, total)
        tl.store(matrix + j * ranks + i, total)


@triton.jit
def _combine(
    blocks: tl.tensor, rows: tl.tensor, weights: tl.tensor, out: tl.tensor,
    ranks: tl.tensor, stride: tl.tensor, aligned: tl.constexpr, size: tl.constexpr,
) -> None:  # fmt: skip
    layer, at, inside = own_block(blocks, aligned, size)
    total = tl.zeros([size], tl.float64)
    for i in range(ranks):
        x = tl.load(rows + at, mask=inside, other=0.0).to(tl.float64)
        total += tl.load(weights + layer * ranks + i) * x
        rows += stride
    if out.dtype.element_ty != tl.float64:
        total = total.to(tl.float32)  # torch rounds to 16 bits by this way too
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)
