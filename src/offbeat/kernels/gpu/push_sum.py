"""Push-sum exchanges on a GPU: one launch for all layers (Assran et al. 2019, Algorithm 1)."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from offbeat.functional import all_finite
from offbeat.functional.push_sum import Messages
from offbeat.kernels import pieces
from offbeat.kernels.blocks import Blocks, blocks_of
from offbeat.kernels.gpu.launch import DTYPES, SIZE, launch, own_block


def fill_messages(
    zs: Sequence[Tensor], anchor: Tensor | None, weight: float, messages: Messages
) -> bool:
    """Fill the messages of one exchange, as :func:`offbeat.kernels.pieces.fill_messages` does.

    ``zs`` are the flat parameters, one after the other in the anchor and in messages. One launch
    reads and writes each byte once, after the check. The kernel runs for one message and sums in
    float32 (32-bit and 16-bit parameters); other inputs are passed to the torch implementation.
    """
    if len(messages) != 1 or not _fit(zs, messages[0][2]):
        return pieces.fill_messages(zs, anchor, weight, messages)
    if not all_finite(zs):
        return False
    ((share, receivers, out),) = messages
    blocks, aligned = _blocks(zs)
    dtype = DTYPES[zs[0].dtype]
    of_anchor = weight - 1 if zs[0].dtype == torch.float32 else weight
    factors = of_anchor, share, float(receivers)
    launch(_fill, len(blocks.rows), blocks.rows, anchor, out, *factors, dtype, aligned, SIZE)
    return True


def add_messages(
    zs: Sequence[Tensor],
    anchor: Tensor | None,
    weight: float,
    sent: Messages,
    arrived: Sequence[Tensor],
) -> None:
    """Add an arrived message, as :func:`offbeat.functional.add_messages` does.

    One launch reads and writes each byte once. The kernel runs for the inputs of
    :func:`fill_messages` and one arrived message; others are passed to the torch implementation.
    """
    held = anchor is not None or len(sent) == 1
    if len(arrived) != 1 or not held or not _fit(zs, arrived[0]):
        return pieces.add_messages(zs, anchor, weight, sent, arrived)
    blocks, aligned = _blocks(zs)
    dtype = DTYPES[zs[0].dtype]
    out, receivers = (None, 0.0) if anchor is not None else (sent[0][2], float(sent[0][1]))
    tensors, factors = (anchor, out, arrived[0]), (1.0 / weight, receivers)
    launch(_add, len(blocks.rows), blocks.rows, *tensors, *factors, dtype, aligned, SIZE)


def fill_and_add(
    zs: Sequence[Tensor],
    anchor: Tensor | None,
    before: float,
    after: float,
    messages: Messages,
    arrived: Sequence[Tensor],
) -> bool:
    """Apply :func:`fill_messages` at weight ``before``, then :func:`add_messages` at ``after``."""
    filled = fill_messages(zs, anchor, before, messages)
    if filled:
        add_messages(zs, anchor, after, messages, arrived)
    return filled


def _fit(zs: Sequence[Tensor], message: Tensor) -> bool:
    dtypes = zs[0].dtype, message.dtype
    return all(dtype in DTYPES for dtype in dtypes) and torch.float64 not in dtypes


def _blocks(zs: Sequence[Tensor]) -> tuple[Blocks, bool]:
    """Return blocks whose owner is the address at which element 0 of the model would lie."""
    ends = list(accumulate(z.numel() for z in zs))
    spans = [
        (z.data_ptr() - (end - z.numel()) * z.itemsize, end - z.numel(), end)
        for z, end in zip(zs, ends, strict=True)
    ]
    blocks = blocks_of(np.array(spans, np.int64), SIZE, zs[0].device)
    return blocks, blocks.aligned and all(address % 16 == 0 for address, _, _ in spans)


@triton.jit
def _fill(
    rows: tl.tensor, anchor: tl.tensor, out: tl.tensor,
    of_anchor: tl.tensor, share: tl.tensor, receivers: tl.tensor,
    dtype: tl.constexpr, aligned: tl.constexpr, size: tl.constexpr,
) -> None:  # fmt: skip
    address, at, inside = own_block(rows, aligned, size)
    z = tl.load(_parameters(address, dtype, aligned) + at, mask=inside)
    x = z.to(tl.float32)
    if anchor is not None:
        a = tl.load(anchor + at, mask=inside)
        if dtype == tl.float32:
            x = x + of_anchor * a
        else:  # the anchor has the digits that rounding took from the parameters
            x = (x - a.to(dtype).to(tl.float32)) + of_anchor * a
    m = (share * x).to(out.dtype.element_ty)
    tl.store(out + at, m, mask=inside)
    if anchor is not None:
        tl.store(anchor + at, x - receivers * m.to(tl.float32), mask=inside)


@triton.jit
def _add(
    rows: tl.tensor, anchor: tl.tensor, out: tl.tensor, arrived: tl.tensor,
    inverse: tl.tensor, receivers: tl.tensor,
    dtype: tl.constexpr, aligned: tl.constexpr, size: tl.constexpr,
) -> None:  # fmt: skip
    address, at, inside = own_block(rows, aligned, size)
    z = _parameters(address, dtype, aligned) + at
    if anchor is not None:
        kept = tl.load(anchor + at, mask=inside)
    else:
        sent = tl.load(out + at, mask=inside).to(tl.float32)
        kept = tl.load(z, mask=inside).to(tl.float32) - receivers * sent
    x = kept + tl.load(arrived + at, mask=inside).to(tl.float32)
    if anchor is not None:
        x = x * inverse
        tl.store(anchor + at, x, mask=inside)
    tl.store(z, x.to(dtype), mask=inside)


@triton.jit
def _parameters(address: tl.tensor, dtype: tl.constexpr, aligned: tl.constexpr) -> tl.tensor:
    pointer = address.to(tl.pointer_type(dtype))
    if aligned:
        pointer = tl.multiple_of(pointer, 16)
    return pointer
