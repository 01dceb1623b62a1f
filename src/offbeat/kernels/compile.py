"""Machine code for inner loops: numba, without the interpreter's lock."""

from collections.abc import Callable
from typing import Any

import torch

Array = Any  # numba specializes on the dtypes at the first call


def not_installed(missing: ImportError) -> ImportError:
    """What to say where a package of the extra is missing."""
    return ImportError(
        f"offbeat.hogwild needs {missing.name}, which is not installed; "
        "install it with: pip install 'offbeat[hogwild]'"
    )


try:
    from numba import njit
except ImportError as missing:
    raise not_installed(missing) from missing

# No "nnan", no "ninf": kernels look for what is not finite. Sums may be reordered and fused.
_FAST = {"contract", "reassoc", "nsz", "arcp"}
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": _FAST}
_ORDERED: dict[str, Any] = {**_OPTIONS, "fastmath": {"contract"}}


def compiled(function: Callable[..., Any]) -> Any:
    """Compile on first call, and keep the code on disk for the next process.

    Where no folder can be written the code is compiled anew in every process, which takes
    seconds. Kernels that call each other lie in one file: the stored code is renewed when that
    file changes, not when another one does.
    """
    return _stored(function, _OPTIONS)


def compiled_in_order(function: Callable[..., Any]) -> Any:
    """As :func:`compiled`, but nothing is reordered: one expression gives one result everywhere."""
    return _stored(function, _ORDERED)


def _stored(function: Callable[..., Any], options: dict[str, Any]) -> Any:
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # "no locator available": nowhere to write
        return njit(**options)(function)


def inlined(function: Callable[..., Any]) -> Any:
    """Compile as part of the kernels that call it, for what is called once a row or coordinate.

    An array is passed as seven numbers: for a few of them that takes as long as updating a row.
    """
    return njit(forceinline=True, **_OPTIONS)(function)


def array_of(tensor: torch.Tensor) -> Array:
    """The same memory for a kernel. Numpy knows no bfloat16: its bits, then.

    >>> array_of(torch.ones(1, dtype=torch.bfloat16))
    array([16256], dtype=uint16)
    """
    bits = tensor.dtype == torch.bfloat16
    return tensor.view(torch.uint16).numpy() if bits else tensor.numpy()
