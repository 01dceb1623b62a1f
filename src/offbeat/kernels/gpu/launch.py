"""The launch of a Triton kernel, and what kernels share."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from offbeat.platform.device import on_device

SIZE = 2048  # elements of a block: 16 for each thread of a program

# Products and sums are not fused: an expression then rounds alike in every kernel, and as the same
# operations of torch do. The passes are limited by memory, not by arithmetic.
OPTIONS = {"enable_fp_fusion": False}
DTYPES = {
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


def launch(kernel: Any, programs: int | tuple[int, ...], rows: Tensor, *args: Any) -> None:
    """Launch a kernel on the device of ``rows``, its first argument."""
    grid = (programs,) if isinstance(programs, int) else programs
    if 0 not in grid:
        with on_device(rows.device):
            kernel[grid](rows, *args, **OPTIONS)


@triton.jit
def own_block(rows: tl.tensor, aligned: tl.constexpr, size: tl.constexpr) -> tl.tuple:
    """Return the owner of this program's block, its indices, and which of them are in it."""
    row = rows + 3 * tl.program_id(0)
    owner, start, stop = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    if aligned:
        start, stop = tl.multiple_of(start, 8), tl.multiple_of(stop, 8)
    at = start + tl.arange(0, size)
    return owner, at, at < stop
