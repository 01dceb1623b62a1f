"""Narrow messages on a GPU: the cast and its error in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from offbeat.functional.messages import narrowing
from offbeat.functional.messages.narrowing import GROUP, Narrow, scales_and_levels
from offbeat.kernels.gpu.launch import SIZE, launch

ROUNDER = tl.constexpr(1.5 * 2**23)  # float32 has no fractions beside it: a sum is rounded to even


def narrow(acc: Tensor, message: Tensor, wire: Narrow) -> None:
    """Fill a message with ``acc``, as :func:`offbeat.functional.messages.narrowing.narrow` does.

    One launch reads and writes each byte once. The kernels run for float32; others are passed to
    the torch implementation. The two agree bit for bit.
    """
    if acc.dtype != torch.float32:
        return narrowing.narrow(acc, message, wire)
    numel = acc.numel()
    if wire == "bf16":
        launch(_cast, triton.cdiv(numel, SIZE), acc, message.view(torch.bfloat16), numel, SIZE)
    else:
        scales, levels = scales_and_levels(message, numel)
        groups = numel // GROUP
        programs = triton.cdiv(groups, SIZE // GROUP)
        launch(_quantize, programs, acc, scales, levels, groups, SIZE // GROUP, GROUP)


@triton.jit
def _cast(acc: tl.tensor, message: tl.tensor, numel: tl.tensor, size: tl.constexpr) -> None:
    at = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    x = tl.load(acc + at, mask=at < numel)
    m = x.to(tl.bfloat16)
    tl.store(message + at, m, mask=at < numel)
    tl.store(acc + at, x - m.to(tl.float32), mask=at < numel)


@triton.jit
def _quantize(
    acc: tl.tensor, scales: tl.tensor, levels: tl.tensor, groups: tl.tensor,
    count: tl.constexpr, width: tl.constexpr,
) -> None:  # fmt: skip
    group = tl.program_id(0).to(tl.int64) * count + tl.arange(0, count)
    at = group[:, None] * width + tl.arange(0, width)[None, :]
    inside = (group < groups)[:, None]
    x = tl.load(acc + at, mask=inside, other=0.0)
    # Divisions and maxima of a GPU are those of torch only if asked for: exact, and NaN is largest.
    broken = tl.max((x != x).to(tl.int32), 1) > 0
    scale = tl.where(broken, float("nan"), tl.div_rn(tl.max(tl.abs(x), 1), 127.0))
    level = (tl.div_rn(x, scale[:, None]) + ROUNDER) - ROUNDER
    level = tl.where(level == level, level, 0.0)  # 0 / 0 where all are 0
    level = tl.minimum(tl.maximum(level, -127.0), 127.0)
    tl.store(scales + group, scale, mask=group < groups)
    tl.store(levels + at, level.to(tl.int8), mask=inside)
    tl.store(acc + at, x - level * scale[:, None], mask=inside)
