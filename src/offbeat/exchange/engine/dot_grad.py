"""Access to ``.grad``, which is a DTensor for parameters that are sharded."""

from typing import Any

import torch
from torch import Tensor

from offbeat.exchange.sharding import held_part, is_sharded, joined, local
from offbeat.transport.group import Group


def stored(parameter: Tensor) -> Tensor | None:
    """Return what this rank holds of ``.grad``; the same object until that is replaced."""
    return None if (grad := parameter.grad) is None else held_part(grad)


def part_with_grad(parameter: Tensor) -> Tensor:
    """Return what this rank holds of a parameter, with what it holds of ``.grad``."""
    part = local(parameter)
    if part is not parameter:
        place(parameter)
        part.grad = stored(parameter)
    return part


def gradient_of(parameter: Tensor) -> Tensor | None:
    """Return what is stored, or None for a parameter that is frozen at the moment, thus unused."""
    return stored(parameter) if parameter.requires_grad else None


def put(parameter: Tensor, view: Tensor) -> None:
    """Make ``view`` the gradient, or a copy if dtype or device differ."""
    dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype  # since torch 2.10
    same = dtype == view.dtype and parameter.device == view.device
    if is_sharded(parameter):
        # In memory of its own: gradients of FSDP2 are views of one tensor, and a write to one
        # counts as a write to all of them.
        part = view if same else torch.empty_like(held_part(parameter), dtype=dtype).copy_(view)
        parameter.grad = joined(part, parameter)
    elif same:
        parameter.grad = view
    elif parameter.grad is None:
        parameter.grad = torch.empty_like(parameter, dtype=dtype).copy_(view)
    else:
        parameter.grad.copy_(view)


def place(parameter: Tensor) -> None:
    """Place the gradient as its parameter; the ranks of the node may communicate."""
    # FSDP2 does so. Tensor parallelism alone leaves summands, and of an embedding all rows.
    grad: Any = parameter.grad
    if grad is None or not is_sharded(parameter):
        return
    placements = parameter.placements  # type: ignore[attr-defined]
    if grad.placements != placements:
        parameter.grad = grad.redistribute(placements=placements)


def require_plain(group: Group, name: str, grad: Tensor) -> None:
    """Raise ``ValueError`` on all ranks for a sparse gradient or one with a graph."""
    if grad.layout is torch.strided and not grad.requires_grad:
        return
    fault = ValueError(
        f"parameter {name!r} has a gradient of layout {grad.layout}, requires_grad="
        f"{grad.requires_grad}; only dense gradients without a graph can be exchanged, and sparse "
        "ones of modules as nn.Embedding(sparse=True): use one or sparse=False, and call "
        "backward() without create_graph"
    )
    raise group.detector.report_error(fault)
