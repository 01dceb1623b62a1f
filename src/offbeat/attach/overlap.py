"""Parameters that share memory, without being the same object."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor


def overlap(tensors: Mapping[str, Tensor], but: Collection[str] = ()) -> tuple[str, str] | None:
    """Return the names of two tensors that share memory, of which ``but`` has one at most, or None.

    >>> flat = torch.zeros(4)
    >>> overlap({"a": flat[:2], "b": flat[2:]})
    >>> overlap({"a": flat[:3], "b": flat[2:]})
    ('a', 'b')
    >>> overlap({"a": flat[::2], "b": flat[1::2]})
    """
    # Empty tensors have no address, nor have subclasses that hold other tensors.
    spans = sorted((*_span(t), name) for name, t in tensors.items() if t.data_ptr() != 0)
    for number, (_, end, name) in enumerate(spans):
        for start, _, other in spans[number + 1 :]:
            if start >= end:
                break
            if not (name in but and other in but) and _share(tensors[name], tensors[other]):
                return name, other
    return None


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of its first byte and behind its last one."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((n - 1) * stride for n, stride in steps)
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def _share(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors share a byte."""
    start = min(one.data_ptr(), other.data_ptr())
    end = max(_span(one)[1], _span(other)[1])
    taken = torch.zeros(end - start, dtype=torch.bool, device="cpu")
    _bytes(one, taken, start).fill_(True)
    return bool(_bytes(other, taken, start).any())


def _bytes(tensor: Tensor, memory: Tensor, start: int) -> Tensor:
    """Return the elements of ``memory``, one for each address from ``start``, of a tensor."""
    strides = [stride * tensor.itemsize for stride in tensor.stride()]
    shape = (*tensor.shape, tensor.itemsize)
    return memory.as_strided(shape, (*strides, 1), tensor.data_ptr() - start)
