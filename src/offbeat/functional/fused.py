"""The two passes of push-sum in machine code, for the CPU, with numba."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offbeat.functional import push_sum
from offbeat.functional.compiled import compiled
from offbeat.functional.push_sum import Messages

Array = Any  # numba specializes on the dtypes at the first call
_HALF, _ONE, _NAN = np.uint32(16), np.uint32(1), np.uint32(0x7FC0)


def share_out(z: Tensor, anchor: Tensor | None, weight: float, messages: Messages) -> None:
    """What :func:`offbeat.functional.share_out` does, reading and writing each byte once.

    With an anchor of z's dtype, float32 or float64, and one message of that dtype or bfloat16;
    all else is left to torch. The two agree up to the rounding of a fused multiply and add.

    >>> z, anchor, message = torch.tensor([3.0]), torch.tensor([2.0]), torch.empty(1)
    >>> share_out(z, anchor, 0.5, [(0.25, 2, message)])
    >>> message, anchor
    (tensor([0.5000]), tensor([1.]))
    """
    if anchor is None or len(messages) != 1 or not _fit(z, anchor, messages[0][2]):
        return push_sum.share_out(z, anchor, weight, messages)
    ((share, receivers, out),) = messages
    number = z.numpy().dtype.type  # else numba would compute in float64
    run = _share_out_16 if out.dtype == torch.bfloat16 else _share_out
    factors = map(number, (weight - 1, share, receivers))
    run(z.numpy(), anchor.numpy(), _array(out), *factors)


def take_in(
    z: Tensor, anchor: Tensor | None, weight: float, sent: Messages, arrived: Sequence[Tensor]
) -> None:
    """What :func:`offbeat.functional.take_in` does, reading and writing each byte once.

    Where :func:`share_out` needs no torch either, and one message has arrived.

    >>> z, anchor = torch.tensor([3.0]), torch.tensor([1.0])
    >>> take_in(z, anchor, 0.5, [], [torch.tensor([4.0])])
    >>> z, anchor
    (tensor([10.]), tensor([10.]))
    """
    if anchor is None or len(arrived) != 1 or not _fit(z, anchor, arrived[0]):
        return push_sum.take_in(z, anchor, weight, sent, arrived)
    run = _take_in_16 if arrived[0].dtype == torch.bfloat16 else _take_in
    number = z.numpy().dtype.type
    run(z.numpy(), anchor.numpy(), _array(arrived[0]), number(1.0 / weight))


def _fit(z: Tensor, anchor: Tensor, message: Tensor) -> bool:
    same = z.dtype == anchor.dtype and z.dtype in (torch.float32, torch.float64)
    cast = z.dtype == torch.float32 and message.dtype == torch.bfloat16
    return same and (cast or message.dtype == z.dtype)


def _array(message: Tensor) -> Array:
    """Numpy knows no bfloat16: its bits, then."""
    bits = message.dtype == torch.bfloat16
    return message.view(torch.uint16).numpy() if bits else message.numpy()


@compiled
def _share_out(z: Array, a: Array, out: Array, less: Any, share: Any, receivers: Any) -> None:
    for i in range(z.size):
        x = z[i] + less * a[i]
        out[i] = share * x
        a[i] = x - receivers * out[i]


@compiled
def _share_out_16(z: Array, a: Array, out: Array, less: Any, share: Any, receivers: Any) -> None:
    for i in range(z.size):
        x = z[i] + less * a[i]
        m = share * x
        bits = np.float32(m).view(np.uint32)
        bits = bits + np.uint32(0x7FFF) + (bits >> _HALF & _ONE)  # to nearest, of two the even one
        bits = bits >> _HALF if m == m else _NAN
        out[i] = bits
        a[i] = x - receivers * np.uint32(bits << _HALF).view(np.float32)


@compiled
def _take_in(z: Array, a: Array, arrived: Array, inverse: Any) -> None:
    for i in range(z.size):
        x = (a[i] + arrived[i]) * inverse
        a[i] = x
        z[i] = x


@compiled
def _take_in_16(z: Array, a: Array, arrived: Array, inverse: Any) -> None:
    for i in range(z.size):
        x = (a[i] + np.uint32(np.uint32(arrived[i]) << _HALF).view(np.float32)) * inverse
        a[i] = x
        z[i] = x
