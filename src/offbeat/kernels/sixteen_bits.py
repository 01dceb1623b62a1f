"""16-bit floats in kernels: arrays hold the bits, of bfloat16 as uint16 and of float16 as int16.

NumPy has no bfloat16, and numba does not compute with float16 on a CPU. :func:`widened` and
:func:`narrowed` are specialized on the dtype of the array that a value is read from or written to.
One kernel source then serves 16-bit and wider dtypes. Nothing is narrowed to float16.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import types

from offbeat.kernels.compile import Array, specialize

Implementation = Callable[..., Any]

_HALF, _ONE, _NAN = np.uint32(16), np.uint32(1), np.uint32(0x7FC0)


def array_of(tensor: torch.Tensor) -> Array:
    """Return a NumPy array that shares the memory of ``tensor``; of 16-bit floats the bits.

    >>> array_of(torch.ones(1, dtype=torch.bfloat16)), array_of(torch.ones(1, dtype=torch.float16))
    (array([16256], dtype=uint16), array([15360], dtype=int16))
    """
    bits = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}.get(tensor.dtype)
    return tensor.numpy() if bits is None else tensor.view(bits).numpy()


def widened(value: Any) -> Any:
    """Convert an element of an array to a float: bits to float32, a float to itself.

    In compiled code only.
    """
    raise RuntimeError("widened() runs in compiled code only")


def narrowed(value: Any, dtype: Any) -> Any:
    """Convert a float to what an array of ``dtype`` holds; :func:`widened` is the inverse.

    In compiled code only. Bits are those of the nearest bfloat16, and of two equally near ones of
    the even one.
    """
    raise RuntimeError("narrowed() runs in compiled code only")


# What kernels call in place of the two, by type. numba requires equal signatures.


def _choose_widened(value: Any) -> Implementation:
    if value == types.int16:
        return _float16_to_float32
    return _bits_to_float32 if value == types.uint16 else _unchanged


def _choose_narrowed(value: Any, dtype: Any) -> Implementation:
    return _float32_to_bits if dtype.dtype == types.uint16 else _unchanged_in


def _unchanged(value: Any) -> Any:
    return value


def _unchanged_in(value: Any, dtype: Any) -> Any:
    return value


def _bits_to_float32(value: Any) -> Any:
    return np.uint32(np.uint32(value) << _HALF).view(np.float32)


def _float16_to_float32(value: Any) -> Any:
    bits = np.uint32(np.uint16(value))
    # Exponent and mantissa in their places, then the difference of the biases, 2^(127 - 15): so
    # subnormal numbers need no branch. The largest exponent is that of infinity and NaN.
    body = np.uint32((bits & np.uint32(0x7FFF)) << np.uint32(13))
    wide = np.float32(body.view(np.float32) * np.float32(2.0**112))
    if bits & np.uint32(0x7C00) == np.uint32(0x7C00):
        wide = np.uint32(body | np.uint32(0x7F800000)).view(np.float32)
    return -wide if bits & np.uint32(0x8000) else wide


def _float32_to_bits(value: Any, dtype: Any) -> Any:
    bits = np.float32(value).view(np.uint32)
    bits = bits + np.uint32(0x7FFF) + (bits >> _HALF & _ONE)
    return np.uint16(bits >> _HALF if value == value else _NAN)


specialize(widened, _choose_widened)
specialize(narrowed, _choose_narrowed)
