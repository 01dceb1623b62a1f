"""Nested values as JSON and tensors, to be sent: nothing that arrives is ever unpickled."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offbeat.exchange.sharding import is_sharded


def taken_apart(value: Any) -> tuple[str, list[Tensor]]:
    """Return ``value`` as JSON, and the tensors in it in order: :func:`put_together` joins them.

    For None, bool, int, float, str, numbers of numpy, which become those of Python, tensors, also
    sparse ones, and lists, tuples and dicts of these; floats keep every bit. Raises ``ValueError``
    for anything else.

    >>> text, (tensor,) = taken_apart({"betas": (0.9, 0.99), 0: torch.ones(2)})
    >>> put_together(text, [tensor])
    {'betas': (0.9, 0.99), 0: tensor([1., 1.])}
    >>> momentum = torch.eye(3).to_sparse()
    >>> torch.equal(put_together(*taken_apart(momentum)).to_dense(), torch.eye(3))
    True
    """
    tensors: list[Tensor] = []

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor) and value.layout is torch.sparse_coo:
            value = value.detach().coalesce()
            return {
                "sparse": [plain(part) for part in (value.indices(), value.values(), value.shape)]
            }
        if isinstance(value, Tensor) and not is_sharded(value):
            tensors.append(value.detach())
            kind, shape = str(value.dtype).removeprefix("torch."), [*value.shape]
            return {"tensor": [kind, shape, value.device.type]}
        if isinstance(value, dict):
            return {"dict": [[plain(key), plain(inner)] for key, inner in value.items()]}
        if isinstance(value, (list, tuple)):
            kind = "list" if isinstance(value, list) else "tuple"
            return {kind: [plain(inner) for inner in value]}
        if isinstance(value, np.generic):  # of a schedule that computes with numpy
            value = value.item()
        if value is None or type(value) in (bool, int, float, str):
            return value
        raise ValueError(
            f"it holds a {type(value).__name__} ({ascii(value)[:60]}), expected numbers, text and "
            "tensors"
        )

    return json.dumps(plain(value)), tensors


def room_for(text: str) -> list[Tensor]:
    """Return tensors to receive those in that :func:`taken_apart` has found."""
    rooms: list[Tensor] = []

    def allocate(pairs: dict[str, Any]) -> None:
        if "tensor" in pairs:
            kind, shape, device = pairs["tensor"]
            rooms.append(torch.empty(shape, dtype=getattr(torch, kind), device=device))

    json.loads(text, object_hook=allocate)
    return rooms


def put_together(text: str, tensors: Sequence[Tensor]) -> Any:
    """Return the value that :func:`taken_apart` has taken apart."""
    left = iter(tensors)

    def whole(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        ((kind, inner),) = value.items()
        if kind == "tensor":
            return next(left)
        if kind == "sparse":
            indices, values, shape = map(whole, inner)
            return torch.sparse_coo_tensor(
                indices, values, shape, is_coalesced=True, check_invariants=True
            )
        if kind == "dict":
            return {whole(key): whole(each) for key, each in inner}
        return (list if kind == "list" else tuple)(whole(each) for each in inner)

    return whole(json.loads(text))
