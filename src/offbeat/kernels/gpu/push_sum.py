"""Push-sum exchanges on a GPU: one launch for all layers (Assran et al. 2019, Algorithm 1)."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from offbeat.functional.push_sum import Messages
from offbeat.kernels import pieces
from offbeat.kernels.blocks import Blocks, blocks_of
from offbeat.kernels.gpu.launch import DTYPES, SIZE, launch, own_block


def fill_messages(
    zs: Sequence[Tensor], anchor: Tensor | None, weight: float, messages: Messages
) -> bool:
    """Fill the messages of one exchange, as :func:`offbeat.kernels.pieces.fill_messages` does.

    ``zs`` are the flat parameters, one after the other in the anchor and in messages. One launch
    reads and writes each byte once, after another that reads the parameters and whose result the
    host waits for: nothing is written if one is not finite. The kernel runs for one message and
    sums in float32 (32-bit and 16-bit parameters); other inputs are passed to the torch
    implementation.
    """
    if len(messages) != 1 or not _fit(zs, messages[0][2]):
        return pieces.fill_messages(zs, anchor, weight, messages)
    ((share, receivers, out),) = messages
    blocks, aligned = _blocks(zs)
    dtype = DTYPES[zs[0].dtype]
    broken = torch.zeros(1, dtype=torch.int32, device=zs[0].device)
    launch(_check, len(blocks.rows), blocks.rows, broken, dtype, aligned, SIZE)
    if broken.item():
        return False
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
    return _blocks_at(tuple((z.data_ptr(), z.numel()) for z in zs), zs[0].itemsize, zs[0].device)


@lru_cache(maxsize=64)
def _blocks_at(
    places: tuple[tuple[int, int], ...], itemsize: int, device: torch.device
) -> tuple[Blocks, bool]:
    """Return blocks whose owner is the address at which element 0 of the model would lie."""
    spans, start = [], 0
    for address, numel in places:
        spans.append((address - start * itemsize, start, start + numel))
        start += numel
    blocks = blocks_of(np.array(spans, np.int64), SIZE, device)
    return blocks, blocks.aligned and all(address % 16 == 0 for address, _, _ in spans)


@triton.jit
def _check(
    rows: tl.tensor, broken: tl.tensor,
    dtype: tl.constexpr, aligned: tl.constexpr, size: tl.constexpr,
) -> None:  # fmt: skip
    """Set ``broken`` if an element is not finite."""
    address, at, inside = own_block(rows, aligned, size)
    z = tl.load(_parameters(address, dtype, aligned) + at, mask=inside, other=0.0).to(tl.float32)
    if tl.min((tl.abs(z) < float("inf")).to(tl.int32), 0) == 0:
        tl.store(broken, 1)


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
