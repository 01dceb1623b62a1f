"""Parameters that share memory, without being the same object."""

from collections.abc import Mapping

import torch
from torch import Tensor


def overlap(tensors: Mapping[str, Tensor]) -> tuple[str, str] | None:
    """Return the names of two tensors that share memory, or None.

    >>> flat = torch.zeros(4)
    >>> overlap({"a": flat[:2], "b": flat[2:]})
    >>> overlap({"a": flat[:3], "b": flat[2:]})
    ('a', 'b')
    >>> overlap({"a": flat[::2], "b": flat[1::2]})
    """
    spans = sorted((*_span(t), name) for name, t in tensors.items() if t.numel() > 0)
    for number, (_, end, name) in enumerate(spans):
        for start, _, other in spans[number + 1 :]:
            if start >= end:
                break
            if _share(tensors[name], tensors[other]):
                return name, other
    return None


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of its first byte and behind its last one."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((n - 1) * stride for n, stride in steps)
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def _share(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors share an element; of different dtypes if one lies in another."""
    if one.itemsize != other.itemsize:
        return True
    return bool(torch.isin(_addresses(one), _addresses(other)).any())


def _addresses(tensor: Tensor) -> Tensor:
    first, end = _span(tensor)
    every = torch.arange(first, end, tensor.itemsize, device="cpu")
    return every.as_strided(tensor.shape, tensor.stride()).reshape(-1)
