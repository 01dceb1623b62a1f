"""The checksum of a saved state, which detects damage between saving and loading."""

import zlib
from collections.abc import Iterator

import torch
from torch import Tensor

Path = tuple[object, ...]


def checksum(value: object) -> int:
    """Return the CRC-32 of nested dicts: of all names, plain values and tensors in them.

    Of a tensor the dtype, the shape and all bits count, not the device or the memory format. The
    order of names does not count: tools that load into a template keep the order of the template.
    A tensor that is not dense, as of a sparse buffer, counts without its values.

    >>> checksum({"a": torch.ones(2), "b": 1}) == checksum({"b": 1, "a": torch.ones(2)})
    True
    """
    crc = 0
    for path, leaf in _leaves(value, ()):
        if isinstance(leaf, Tensor):
            crc = zlib.crc32(f"{path!r} {leaf.dtype} {tuple(leaf.shape)}".encode(), crc)
            crc = zlib.crc32(_bits(leaf), crc)
        else:
            crc = zlib.crc32(f"{path!r} {leaf!r}".encode(), crc)
    return crc


def _leaves(value: object, path: Path) -> Iterator[tuple[Path, object]]:
    if isinstance(value, dict):
        for key, inner in sorted(value.items(), key=lambda item: repr(item[0])):
            yield from _leaves(inner, (*path, key))
    else:
        yield path, value


def _bits(tensor: Tensor) -> bytes | memoryview:
    if tensor.is_meta or tensor.is_quantized or tensor.layout is not torch.strided:
        return b""
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # Not reshape(): it keeps any stride, 0 too, of a tensor with one element.
    flat = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy()
    return memoryview(flat)  # type: ignore[arg-type]  # a buffer; numpy's stubs say so from 3.12 on
