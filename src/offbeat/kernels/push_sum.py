"""Push-sum exchanges on the CPU, compiled by numba (Assran et al. 2019, Algorithm 1)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offbeat.functional.push_sum import Messages
from offbeat.kernels import pieces
from offbeat.kernels.addresses import array_at
from offbeat.kernels.compile import Array, compiled_in_order, inlined_in_order
from offbeat.kernels.sixteen_bits import array_of, narrowed, widened

CHUNK = 2**11  # elements: checked first, and still in the cache when they are read again


def fill_messages(
    zs: Sequence[Tensor], anchor: Tensor | None, weight: float, messages: Messages
) -> bool:
    """Fill the messages of one exchange, as :func:`offbeat.kernels.pieces.fill_messages` does.

    ``zs`` are the flat parameters, one after the other in the anchor and in messages. One call for
    all of them; each byte is read and written once. The kernel runs for an anchor of the
    parameters' dtype (float32 or float64) and one message of that dtype or, with float32, of
    bfloat16; other inputs are passed to the torch implementation. The two agree up to the rounding
    of a fused multiply-add. Where parameters are not finite the pass stops.

    >>> z, anchor, message = torch.tensor([3.0]), torch.tensor([2.0]), torch.empty(1)
    >>> fill_messages([z], anchor, 0.5, [(0.25, 2, message)])
    True
    >>> message, anchor
    (tensor([0.5000]), tensor([1.]))
    """
    if anchor is None or len(messages) != 1 or not _fit(zs, anchor, messages[0][2]):
        return pieces.fill_messages(zs, anchor, weight, messages)
    ((share, receivers, out),) = messages
    factors = _factors(anchor, weight - 1, share, receivers)
    return bool(_fill(_table(zs), anchor.numpy(), array_of(out), *factors))


def add_messages(
    zs: Sequence[Tensor],
    anchor: Tensor | None,
    weight: float,
    sent: Messages,
    arrived: Sequence[Tensor],
) -> None:
    """Add an arrived message, as :func:`offbeat.functional.add_messages` does.

    Each byte is read and written once. The kernel runs for the dtypes of :func:`fill_messages`
    and one message; other inputs are passed to the torch implementation.

    >>> z, anchor = torch.tensor([3.0]), torch.tensor([1.0])
    >>> add_messages([z], anchor, 0.5, [], [torch.tensor([4.0])])
    >>> z, anchor
    (tensor([10.]), tensor([10.]))
    """
    if anchor is None or len(arrived) != 1 or not _fit(zs, anchor, arrived[0]):
        return pieces.add_messages(zs, anchor, weight, sent, arrived)
    _add(_table(zs), anchor.numpy(), array_of(arrived[0]), *_factors(anchor, 1.0 / weight))


def fill_and_add(
    zs: Sequence[Tensor],
    anchor: Tensor | None,
    before: float,
    after: float,
    messages: Messages,
    arrived: Sequence[Tensor],
) -> bool:
    """Fill the messages at weight ``before`` and add the arrived ones at weight ``after``.

    The result equals that of :func:`fill_messages` and :func:`add_messages` bit for bit. One pass
    over memory instead of two: 28 bytes per parameter instead of 40 (float32, 16-bit messages,
    including the reads that precede writes); for 3.2 million uncached parameters in 46 tensors
    1.2 ms instead of 1.8 ms.

    >>> z, anchor, message = torch.tensor([3.0]), torch.tensor([2.0]), torch.empty(1)
    >>> fill_and_add([z], anchor, 0.5, 0.25, [(0.25, 2, message)], [torch.tensor([2.0])])
    True
    >>> message, anchor, z
    (tensor([0.5000]), tensor([12.]), tensor([12.]))
    """
    one = len(messages) == len(arrived) == 1 and messages[0][2].dtype == arrived[0].dtype
    if anchor is None or not one or not _fit(zs, anchor, arrived[0]):
        filled = fill_messages(zs, anchor, before, messages)
        if filled:
            add_messages(zs, anchor, after, messages, arrived)
        return filled
    ((share, receivers, out),) = messages
    factors = _factors(anchor, before - 1, share, receivers, 1.0 / after)
    both = array_of(out), array_of(arrived[0])
    return bool(_fill_and_add(_table(zs), anchor.numpy(), *both, *factors))


def _fit(zs: Sequence[Tensor], anchor: Tensor, message: Tensor) -> bool:
    same = zs[0].dtype == anchor.dtype and anchor.dtype in (torch.float32, torch.float64)
    cast = anchor.dtype == torch.float32 and message.dtype == torch.bfloat16
    return same and (cast or message.dtype == anchor.dtype)


def _factors(anchor: Tensor, *factors: float) -> list[Any]:
    """Return the factors in the dtype of the anchor: Python floats would promote to float64."""
    return [*map(anchor.numpy().dtype.type, factors)]


def _table(zs: Sequence[Tensor]) -> Array:
    """Return the address and the number of elements of every piece."""
    return np.array([(z.data_ptr(), z.numel()) for z in zs], np.int64)


# One expression must round alike in all kernels: whether messages had arrived when the next ones
# were sent depends on timing, and results must not. Loops run over slices: the compiler cannot know
# that an index into a longer array is not negative, which numba counts from the end, and would not
# vectorize them.


@compiled_in_order
def _fill(
    table: Array, anchor: Array, messages: Array, less: Any, share: Any, receivers: Any
) -> Any:
    start = 0
    for p in range(len(table)):
        piece = array_at(table[p, 0], table[p, 1], anchor)
        for first in range(0, piece.size, CHUNK):
            z = piece[first : first + CHUNK]
            a = anchor[start + first : start + first + z.size]
            out = messages[start + first : start + first + z.size]
            if not _finite(z):
                return False
            for i in range(z.size):
                x = z[i] + less * a[i]
                m = narrowed(share * x, out.dtype)
                out[i] = m
                a[i] = x - receivers * widened(m)
        start += piece.size
    return True


@compiled_in_order
def _add(table: Array, anchor: Array, messages: Array, inverse: Any) -> None:
    start = 0
    for p in range(len(table)):
        z = array_at(table[p, 0], table[p, 1], anchor)
        a, arrived = anchor[start : start + z.size], messages[start : start + z.size]
        for i in range(z.size):
            x = (a[i] + widened(arrived[i])) * inverse
            a[i] = x
            z[i] = x
        start += z.size


@compiled_in_order
def _fill_and_add(
    table: Array, anchor: Array, sent: Array, received: Array,
    less: Any, share: Any, receivers: Any, inverse: Any,
) -> Any:  # fmt: skip
    start = 0
    for p in range(len(table)):
        piece = array_at(table[p, 0], table[p, 1], anchor)
        for first in range(0, piece.size, CHUNK):
            z = piece[first : first + CHUNK]
            begin, end = start + first, start + first + z.size
            a, out, arrived = anchor[begin:end], sent[begin:end], received[begin:end]
            if not _finite(z):
                return False
            for i in range(z.size):
                x = z[i] + less * a[i]
                m = narrowed(share * x, out.dtype)
                out[i] = m
                x = ((x - receivers * widened(m)) + widened(arrived[i])) * inverse
                a[i] = x
                z[i] = x
        start += piece.size
    return True


@inlined_in_order
def _finite(z: Array) -> Any:
    wrong = 0
    for i in range(z.size):
        wrong |= not abs(z[i]) < np.inf
    return wrong == 0
