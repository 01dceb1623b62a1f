"""Arrays at addresses of memory, for kernels that read many tensors in one call."""

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from offbeat.kernels.compile import Array, inlined


def _pointer(typing: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


_to_pointer: Any = intrinsic(_pointer)


@inlined
def array_at(address: Any, size: Any, like: Array) -> Array:
    """Return the ``size`` elements at an address as an array of the dtype of ``like``.

    In compiled code only. Whoever passes the address keeps the memory.
    """
    return carray(_to_pointer(address), size, like.dtype)
