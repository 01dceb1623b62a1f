"""Prefetch instructions for compiled code; numba has no function for them."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

READ, WRITE, NEAR, DATA = 0, 1, 3, 1  # arguments of llvm.prefetch: access, locality, cache type
Typed = tuple[Any, Callable[..., Any]]


def _typed(array: Any, index: Any, purpose: int) -> Typed:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind, place = signature.args
        view = context.make_array(kind)(context, builder, arguments[0])
        at = context.cast(builder, arguments[1], place, types.intp)
        where = cgutils.get_item_pointer(context, builder, kind, view, [at], wraparound=False)
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        call = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, call, "llvm.prefetch.p0i8")
        how = [number(value) for value in (purpose, NEAR, DATA)]
        builder.call(function, [builder.bitcast(where, byte), *how])
        return context.get_dummy_value()

    return types.void(array, index), generate


def _prefetch(typing: Any, array: Any, index: Any) -> Typed:
    return _typed(array, index, READ)


def _claim(typing: Any, array: Any, index: Any) -> Typed:
    return _typed(array, index, WRITE)


# prefetch(array, index), in compiled code only: start to load array[index] into the cache. It
# does not block and does not fail, not even past the end of the array.
prefetch: Any = intrinsic(_prefetch)
# claim(array, index): the same before a write; the copies of the line in other cores are
# invalidated.
claim: Any = intrinsic(_claim)
