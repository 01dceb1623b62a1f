"""What must hold before replicas can train together: checked on all ranks, alike."""

import json
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from offbeat.backward import is_watched
from offbeat.collectives import broadcast, gather_bytes, wire_device
from offbeat.groups import Group

Fingerprint = dict[str, Any]


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are exchanged, by name; a tied parameter once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def fault(model: nn.Module) -> str | None:
    """What makes this rank's model impossible to replicate, or None."""
    parameters = dict(model.named_parameters())
    if isinstance(model, DistributedDataParallel):
        return "the model is wrapped in DistributedDataParallel; pass the bare model (model.module)"
    if not any(p.requires_grad for p in parameters.values()):
        return "the model has no trainable parameters; there is nothing to exchange"
    for name, p in parameters.items():
        if isinstance(p, nn.UninitializedParameter):
            return f"parameter {name!r} is not initialized yet; run one forward pass first"
        if isinstance(p, DTensor):
            return f"parameter {name!r} is sharded (DTensor); replicate unsharded models"
        if p.is_meta:
            return f"parameter {name!r} is on the meta device; materialize the model first"
        if p.is_complex():
            return f"parameter {name!r} is complex; store it as torch.view_as_real"
        if is_watched(p):
            return f"parameter {name!r} already belongs to a replica; call its detach() first"
    devices = {str(p.device) for p in parameters.values()}
    if len(devices) > 1:
        return f"the parameters lie on several devices ({', '.join(sorted(devices))}); use one"
    return _sparse_embedding(model)


def _sparse_embedding(model: nn.Module) -> str | None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            return (
                f"module {name!r} makes sparse gradients, and only dense ones can be exchanged; "
                "set sparse=False"
            )
    return None


def fingerprint(model: nn.Module, algorithm: object, nodes: object) -> Fingerprint:
    """Everything that must be equal on all ranks, as plain values."""
    tensors: dict[str, list[object]] = {}
    for name, p in model.named_parameters():
        kind = "trainable" if p.requires_grad else "frozen"
        strides = torch.empty_like(p, device="meta").stride()
        tensors[name] = [kind, list(p.shape), str(p.dtype), list(strides)]
    for name, b in model.named_buffers():
        tensors[name] = ["buffer", list(b.shape), str(b.dtype), []]
    return {"tensors": tensors, "algorithm": repr(algorithm), "nodes": repr(nodes)}


def agree(mine: Fingerprint, fault: str | None, group: Group | None) -> None:
    """Raise the same ValueError on all ranks if any has a fault or differs from the first."""
    raise_alike(fault, group)
    if group is None:
        return
    everyone = [json.loads(said) for said in gather_bytes(json.dumps(mine).encode(), group)]
    for rank, said in zip(group.ranks, everyone, strict=True):
        difference = _difference(everyone[0], said)
        if difference is not None:
            raise ValueError(
                f"ranks {group.ranks[0]} and {rank} differ: {difference}; build the same model "
                "with the same algorithm on every rank"
            )


def raise_alike(fault: str | None, group: Group | None) -> None:
    """Raise a ValueError on all ranks if any has a ``fault``, naming the first that has."""
    faults = (
        [(fault or "").encode()] if group is None else gather_bytes((fault or "").encode(), group)
    )
    ranks = (None,) if group is None else group.ranks
    for rank, text in zip(ranks, faults, strict=True):
        if text:
            where = "" if rank is None else f"rank {rank}: "
            raise ValueError(where + text.decode())


def _difference(first: Fingerprint, other: Fingerprint) -> str | None:
    for key in ("algorithm", "nodes"):
        if first[key] != other[key]:
            return f"the {key} is {first[key]} here and {other[key]} there"
    here, there = first["tensors"], other["tensors"]
    for name in {**here, **there}:
        if (name in here) != (name in there):
            return f"{name!r} exists on only one of them"
        for what, a, b in zip(
            ("kind", "shape", "dtype", "strides"), here[name], there[name], strict=True
        ):
            if a != b:
                return f"the {what} of {name!r} is {a} here and {b} there"
    if list(here) != list(there):
        return "their parameters come in different orders"
    return None


def equalize(model: nn.Module, group: Group | None) -> None:
    """Copy all parameters and buffers of the group's first rank to the others."""
    if group is None:
        return
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    for tensor in tensors:
        wire = tensor.detach().to(wire_device(group, tensor.device)).contiguous()
        broadcast(wire, 0, group).wait()
        if group.rank != 0:
            tensor.detach().copy_(wire)
