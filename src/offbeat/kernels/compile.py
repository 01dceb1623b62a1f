"""Compilation of inner loops by numba, without the interpreter's lock."""

from collections.abc import Callable
from typing import Any

from offbeat.extras import extra

with extra("hogwild"):  # others ask whether there is numba before they import this
    from numba import njit
    from numba.extending import overload, register_jitable

Array = Any  # numba specializes on the dtypes at the first call

# Without "nnan" and "ninf": kernels test for non-finite values. Sums may be reordered and fused.
_FAST = {"contract", "reassoc", "nsz", "arcp"}
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": _FAST}
_ORDERED: dict[str, Any] = {**_OPTIONS, "fastmath": {"contract"}}
_INLINED: Any = {**_OPTIONS, "forceinline": True}


def compiled(function: Callable[..., Any]) -> Any:
    """Compile ``function`` at its first call, and store the machine code on disk.

    Where no folder is writable, every process compiles again, which takes seconds. The stored
    code is renewed when the file of ``function`` changes, not when another file does: kernels
    that call each other share a file. What kernels call from another file (the conversions of
    :mod:`offbeat.kernels.sixteen_bits`, prefetching, arrays at addresses) has a fixed meaning.
    """
    return _stored(function, _OPTIONS)


def compiled_in_order(function: Callable[..., Any]) -> Any:
    """Compile as :func:`compiled` does, without reordering any operation.

    The same expression then gives the same result in every kernel.
    """
    return _stored(function, _ORDERED)


def _stored(function: Callable[..., Any], options: dict[str, Any]) -> Any:
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # "no locator available": no folder is writable
        return njit(**options)(function)


def inlined(function: Callable[..., Any]) -> Any:
    """Compile ``function`` as a part of the kernels that call it.

    For functions that are called once for each row or coordinate. A call passes an array as seven
    numbers: for a few arrays that takes as long as the update of a row.
    """
    return njit(**_INLINED)(function)


def inlined_in_order(function: Callable[..., Any]) -> Any:
    """Compile as :func:`inlined` does, for kernels of :func:`compiled_in_order`."""
    return njit(**{**_ORDERED, "forceinline": True})(function)


def specialize(stub: Callable[..., Any], choose: Callable[..., Callable[..., Any]]) -> None:
    """Let compiled code call ``stub``, implemented by what ``choose`` returns for argument types.

    The implementation becomes a part of the calling kernel, as with :func:`inlined`.
    """
    overload(stub, jit_options=_INLINED)(choose)


def admit(function: Callable[..., Any]) -> None:
    """Let compiled code call a plain Python ``function``, which itself remains as it is."""
    register_jitable(**_OPTIONS)(function)
