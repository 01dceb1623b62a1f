"""Compiles every kernel for GPUs that are not there; prints what the instructions tell, as JSON.

A process of its own: where the interpreter was asked for, nothing can be compiled.
"""

import json
import sys
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from offbeat.kernels.gpu import adasum, narrowing, push_sum, top_k
from offbeat.kernels.gpu.launch import OPTIONS, SIZE

ROWS, EVEN = "*i64", True
CASES: dict[str, tuple[Any, list[Any]]] = {  # types of arguments, values of constants
    "check": (push_sum._check, [ROWS, "*i32", tl.float32, EVEN, SIZE]),
    "fill": (push_sum._fill, [ROWS, "*fp32", "*bf16", *["fp32"] * 3, tl.float32, EVEN, SIZE]),
    "fill, 16 bits": (
        push_sum._fill, [ROWS, "*fp32", "*bf16", *["fp32"] * 3, tl.bfloat16, EVEN, SIZE],
    ),
    "fill, odd": (push_sum._fill, [ROWS, "*fp32", "*bf16", *["fp32"] * 3, tl.float32, False, SIZE]),
    "fill, no anchor": (
        push_sum._fill, [ROWS, None, "*fp32", *["fp32"] * 3, tl.float32, EVEN, SIZE],
    ),
    "add": (push_sum._add, [ROWS, "*fp32", None, "*bf16", *["fp32"] * 2, tl.float32, EVEN, SIZE]),
    "add, no anchor": (
        push_sum._add, [ROWS, None, "*fp32", "*fp32", *["fp32"] * 2, tl.float16, EVEN, SIZE],
    ),
    "cast": (narrowing._cast, ["*fp32", "*bf16", "i32", SIZE]),
    "quantize": (narrowing._quantize, ["*fp32", "*fp32", "*i8", "i32", 8, 256]),
    "products": (adasum._products, [ROWS, "*fp32", "*fp64", *["i32"] * 3, EVEN, SIZE]),
    "products, 16 bits": (adasum._products, [ROWS, "*bf16", "*fp64", *["i32"] * 3, EVEN, SIZE]),
    "sums": (adasum._sums, [ROWS, "*fp64", "*fp64", "i32", "i32", adasum.SUMS.value]),
    "combine": (adasum._combine, [ROWS, "*fp32", "*fp64", "*fp32", "i32", "i32", EVEN, SIZE]),
    "combine, 16 bits": (
        adasum._combine, [ROWS, "*fp16", "*fp64", "*bf16", "i32", "i32", EVEN, SIZE],
    ),
    # Triton makes a constant of an argument that is 1.
    "products, one rank": (adasum._products, [ROWS, "*fp32", "*fp64", 1, "i32", 1, EVEN, SIZE]),
    "sums, one rank": (adasum._sums, [ROWS, "*fp64", "*fp64", 1, 1, adasum.SUMS.value]),
    "combine, one rank": (
        adasum._combine, [ROWS, "*fp32", "*fp64", "*fp32", 1, "i32", EVEN, SIZE],
    ),
    "quantize, one group": (narrowing._quantize, ["*fp32", "*fp32", "*i8", 1, 8, 256]),
    "maxima": (
        top_k._maxima,
        [ROWS, "*fp32", *["*i32"] * 2, top_k.TOP, top_k.BINS, EVEN, top_k.GROUPS, top_k.GROUP],
    ),
    "bound": (top_k._bound, [*["*i32"] * 5, top_k.TOP, top_k.BINS]),
    "digits": (
        top_k._digits,
        [ROWS, "*fp32", *["*i32"] * 4, 7, 12, top_k.BINS, EVEN, top_k.GROUPS, top_k.GROUP],
    ),
    "descend": (top_k._descend, [*["*i32"] * 3, 12, top_k.BINS]),
    "tally": (
        top_k._tally, [ROWS, "*fp32", *["*i32"] * 3, EVEN, top_k.GROUPS, top_k.GROUP],
    ),
    "place": (
        top_k._place,
        [ROWS, ROWS, "*fp32", *["*i32"] * 5, ROWS, ROWS, EVEN, top_k.GROUPS, top_k.GROUP],
    ),
}  # fmt: skip


def compiled(kernel: Any, given: list[Any], architecture: int) -> dict[str, int]:
    """Compile down to machine code; bytes of it, and counts of some instructions."""
    names = kernel.arg_names
    signature = {
        n: g if isinstance(g, str) else "constexpr" for n, g in zip(names, given, strict=True)
    }
    constants = {n: g for n, g in zip(names, given, strict=True) if not isinstance(g, str)}
    even = [["tt.divisibility", 16]]
    hints = {(i,): even for i, g in enumerate(given) if isinstance(g, str) and g[0] in "*i"}
    made = triton.compile(
        ASTSource(kernel, signature, constants, hints),
        target=GPUTarget("cuda", architecture, 32),
        options=OPTIONS,
    )
    lines = made.asm["ptx"].splitlines()
    counts = {
        "wide": ("global.v4.b32", "global.v2.b64"),
        "single": ("global.b32 ", "global.b16 ", "global.b8 "),
        "fused": ("fma.",),
        "rounded": ("cvt.rn.bf16",),
        "approximate": ("div.full", "div.approx", "rcp."),
    }
    found = {name: sum(any(p in x for p in parts) for x in lines) for name, parts in counts.items()}
    return {"bytes": len(made.asm["cubin"]), "shared": made.metadata.shared, **found}


if __name__ == "__main__":
    asked = [int(each) for each in sys.argv[1:]]
    print(json.dumps({
        f"{name}, sm_{a}": compiled(*case, a) for name, case in CASES.items() for a in asked
    }))  # fmt: skip
