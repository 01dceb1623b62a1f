"""Where kernels in Triton are tested: on a GPU or, without one, interpreted on the CPU."""

import os
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def kernels_of(name: str) -> Any:
    """A module of kernels; without Triton the tests of the calling module are skipped."""
    if find_spec("triton") is None:
        pytest.skip("needs Triton, which PyTorch for CUDA installs", allow_module_level=True)
    if DEVICE == "cpu" and "TRITON_INTERPRET" not in os.environ:
        os.environ["TRITON_INTERPRET"] = "1"  # asked for where a kernel is defined
        _correct_the_interpreter()
    return import_module(f"offbeat.kernels.gpu.{name}")


def _correct_the_interpreter() -> None:
    """Make the interpreter of Triton 3.6 round as GPUs do, and work with NumPy 2.4.

    It cuts the bits that bfloat16 does not have, and takes a number for an array of one number.
    """
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    others, patch = InterpreterBuilder.cast_impl, interpreter._patch_lang_tensor

    def cast(self: Any, source: Any, dtype: Any) -> Any:
        if (source.dtype.scalar, dtype.scalar) != (tl.float32, tl.bfloat16):
            return others(self, source, dtype)
        bits = torch.tensor(source.data).bfloat16().view(torch.uint16).numpy()
        return TensorHandle(bits, tl.bfloat16)

    def patch_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    InterpreterBuilder.cast_impl, interpreter._patch_lang_tensor = cast, patch_tensor
