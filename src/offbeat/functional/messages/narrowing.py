r"""Narrow messages of wide tensors, with error feedback: bfloat16, or 8 bits with scales.

All tensors are flat; messages are bytes.
"""

from typing import Literal

import torch
from torch import Tensor

Narrow = Literal["bf16", "int8"]

GROUP = 256  # values that share a scale


def narrow_bytes(numel: int, wire: Narrow) -> int:
    """Return the bytes of a message of ``numel`` values, a multiple of 256.

    >>> narrow_bytes(1024, "bf16"), narrow_bytes(1024, "int8")
    (2048, 1040)
    """
    return 2 * numel if wire == "bf16" else numel + 4 * (numel // GROUP)


def narrow(acc: Tensor, message: Tensor, wire: Narrow) -> None:
    r"""Fill a message with ``acc``, and leave in ``acc`` what rounding has taken.

    .. math:: m = C(acc), \qquad acc \leftarrow acc - m

    "int8": q = round(x / s) for 256 values at a time, with the scale s = max |x| / 127 in float32.
    If a value is not finite, nor are the values that :func:`widen` makes of its group.

    >>> acc = torch.tensor([1.0 + 2**-10] + [0.0] * 255)
    >>> narrow(acc, message := torch.zeros(512, dtype=torch.uint8), "bf16")
    >>> widen(message, torch.zeros(256), "bf16")[0], acc[0] == 2**-10
    (tensor(1.), tensor(True))
    """
    if wire == "bf16":
        message.view(torch.bfloat16).copy_(acc)
    else:
        scales, levels = scales_and_levels(message, acc.numel())
        groups = acc.view(-1, GROUP)
        # By a tensor: a GPU multiplies by the reciprocal of a number, which rounds differently.
        scales.copy_(groups.abs().amax(1) / scales.new_tensor(127.0))
        # 0 / 0 where all are 0. A scale that was rounded down could make 127.5 of the largest.
        divided = (groups / scales.unsqueeze(1)).round().nan_to_num(0).clamp(-127, 127)
        levels.view(-1, GROUP).copy_(divided)
    acc.sub_(widen(message, torch.empty_like(acc), wire))


def widen(message: Tensor, out: Tensor, wire: Narrow) -> Tensor:
    """Fill ``out`` with the values of a message, and return it."""
    if wire == "bf16":
        return out.copy_(message.view(torch.bfloat16))
    scales, levels = scales_and_levels(message, out.numel())
    torch.mul(
        levels.view(-1, GROUP).to(out.dtype),
        scales.unsqueeze(1).to(out.dtype),
        out=out.view(-1, GROUP),
    )
    return out


def scales_and_levels(message: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """Return the scales and the levels, in this order: scales are aligned to 4 bytes."""
    size = 4 * (numel // GROUP)
    return message[:size].view(torch.float32), message[size:].view(torch.int8)
