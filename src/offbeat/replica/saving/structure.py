"""The comparison of a saved state with what this replica itself would save."""

import torch
from torch import Tensor, nn


def require_same_structure(own: object, found: object, path: str) -> None:
    """Raise ``ValueError`` where ``found`` could not stand in the place of ``own``.

    Names, shapes and kinds of values must be equal; ``bool`` is not ``int``, but an ``int`` may
    stand for a ``float``. Tensors may differ in dtype within one kind (complex, floating or
    integral), in device and in memory format. Lists may differ in length: what stands in them is
    the exchange's to check.
    """
    if isinstance(own, Tensor):
        _require_same_kind(own, found, path)
    elif isinstance(own, dict):
        if not isinstance(found, dict):
            raise ValueError(f"{path} is {_short(found)}, expected a dict")
        for key in own:
            if key not in found:
                raise ValueError(f"{path} lacks {key!a}")
        for key in found:
            if key not in own:
                raise ValueError(f"{path} has {_short(key)}, which nothing here expects")
        for key, value in own.items():
            require_same_structure(value, found[key], f"{path}[{key!a}]")
    elif type(found) is not type(own) and (type(own), type(found)) != (float, int):
        raise ValueError(f"{path} is {_short(found)}, expected a {type(own).__name__}")


def require_finite(found: object, path: str) -> None:
    """Raise ``ValueError`` for a floating tensor in ``found`` with NaN or infinite values."""
    if isinstance(found, dict):
        for key, value in found.items():
            require_finite(value, f"{path}[{key!a}]")
    elif isinstance(found, Tensor) and found.is_floating_point() and not _is_finite(found):
        raise ValueError(
            f"{path} has values that are not finite: the run had diverged; load an earlier state"
        )


def _is_finite(tensor: Tensor) -> bool:
    # A sum is finite only if all values are, and takes a tenth of the time of asking each.
    return bool(tensor.sum(dtype=torch.float64).isfinite())


def _require_same_kind(own: Tensor, found: object, path: str) -> None:
    shape = tuple(own.shape)
    # A subclass, such as a DTensor, may refuse to be copied from after others have been.
    if not isinstance(found, Tensor) or type(found) not in (Tensor, nn.Parameter, type(own)):
        raise ValueError(f"{path} is {_short(found)}, expected a tensor of shape {shape}")
    if found.shape != own.shape:
        raise ValueError(f"{path} has the shape {tuple(found.shape)}, expected {shape}")
    if found.is_meta or found.layout != own.layout:
        raise ValueError(
            f"{path} has the layout {found.layout} on {found.device}, expected {own.layout} and "
            "values in memory"
        )
    if _kind(found) != _kind(own):
        raise ValueError(f"{path} has the dtype {found.dtype}, expected {own.dtype}")


def _kind(tensor: Tensor) -> str:
    if tensor.is_complex() or tensor.is_quantized:
        return "complex" if tensor.is_complex() else "quantized"
    return "floating" if tensor.is_floating_point() else "integral"


def _short(found: object) -> str:
    return ascii(found)[:40]
