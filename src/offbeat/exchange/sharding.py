"""Parameters that FSDP2 or tensor parallelism has divided among the ranks of a node."""

import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.transport.group import Group
from offbeat.transport.small_gathers import gather_numbers
from offbeat.transport.world import World

_PART = "part of a sharded tensor"
_PLAIN = Tensor, nn.Parameter


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor, of which each rank holds a part."""
    if type(tensor) in _PLAIN:  # asked several times a step of each gradient
        return False
    # A model with a DTensor has imported its module; importing it here takes a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_flattened(model: nn.Module) -> bool:
    """Return whether FSDP1 holds parameters of a model, which have no shapes of their own."""
    return bool(_fsdp_modules(model, "FullyShardedDataParallel"))


def gathering_modules(model: nn.Module) -> list[Any]:
    """Return the modules to which ``fully_shard`` was applied."""
    return _fsdp_modules(model, "FSDPModule")


def _fsdp_modules(model: nn.Module, kind: str) -> list[Any]:
    if (fsdp := sys.modules.get("torch.distributed.fsdp")) is None:
        return []
    return [module for module in model.modules() if isinstance(module, getattr(fsdp, kind))]


def local(parameter: Tensor) -> Tensor:
    """Return what this rank holds of a parameter: a tensor that shares its memory.

    >>> weight = nn.Parameter(Tensor([1.0]))
    >>> local(weight) is weight
    True
    """
    if not is_sharded(parameter):
        return parameter
    part: Tensor = parameter.to_local().detach()  # type: ignore[attr-defined]
    return part.requires_grad_(parameter.requires_grad)


def held_part(tensor: Tensor) -> Tensor:
    """Return the tensor in which this rank holds its part; the same object at each call."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():  # otherwise a view of it
        part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part


def joined(part: Tensor, like: Tensor) -> Tensor:
    """Return a tensor that is sharded as ``like``, and of which this rank holds ``part``."""
    # As FSDP2 makes its gradients. ``from_local`` would copy those of parameters that are offloaded
    # to the CPU to the device of the mesh.
    kind: Any = sys.modules["torch.distributed.tensor"].DTensor
    tensor: Tensor = kind(part, like._spec, requires_grad=False)  # type: ignore[attr-defined]
    return tensor


def unsharded(optimizer: Any) -> dict[str, Any]:
    """Return the state of ``optimizer`` with this rank's part of each value that is sharded."""

    def part(parameter: Tensor, value: Any) -> Any:
        # Of another shape, its parts cannot be joined by what the parameter knows.
        is_like = is_sharded(value) and value.shape == parameter.shape
        return {_PART: held_part(value)} if is_like else value

    return _with_values(optimizer, optimizer.state_dict(), part)


def load_parts(optimizer: Any, state: dict[str, Any]) -> None:
    """Load what :func:`unsharded` has returned for an optimizer of the same shards."""

    def whole_of(parameter: Tensor, value: Any) -> Any:
        is_part = isinstance(value, dict) and [*value] == [_PART]
        return joined(value[_PART], parameter) if is_part else value

    optimizer.load_state_dict(_with_values(optimizer, state, whole_of))


def _with_values(
    optimizer: Any, state: dict[str, Any], made_of: Callable[[Tensor, Any], Any]
) -> dict[str, Any]:
    parameters = [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]
    if not any(map(is_sharded, parameters)):
        return state
    values = {
        i: {name: made_of(parameters[i], value) for name, value in of_one.items()}
        for i, of_one in state["state"].items()
    }
    return {**state, "state": values}


def placed(tensor: Tensor) -> str:
    """Return how a DTensor is divided, for comparison between ranks; "" for another tensor."""
    if not is_sharded(tensor):
        return ""
    return f", {tensor.placements} on {tuple(tensor.device_mesh.shape)}"  # type: ignore[attr-defined]


def version(tensor: Tensor) -> int:
    """Return a number that every write in place increments."""
    # Optimizers and scripts write to a DTensor, which does not count for the part that this rank
    # holds; FSDP2 accumulates gradients in the part, which does not count for the DTensor.
    part = held_part(tensor)
    return tensor._version if part is tensor else tensor._version + part._version


def has_one_axis(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether every trainable tensor is divided along one axis: each rank has its own part.

    >>> has_one_axis({"w": nn.Parameter(Tensor([1.0]))})
    False
    """
    return all(
        is_sharded(t) and [p.is_replicate() for p in t.placements] == [False]  # type: ignore[attr-defined]
        for t in tensors.values()
        if t.requires_grad
    )


def holders(parameters: Mapping[str, Tensor], world: World) -> dict[str, tuple[int, ...]]:
    """Return the local ranks that hold the same part of each parameter as this one, ascending."""
    # Several where FSDP2 replicates (hybrid sharding), and of what tensor parallelism does not
    # divide, such as norms: DTensors that are replicated along an axis of the mesh of the node, or
    # lie on the others alone, and plain tensors.
    if has_one_axis(parameters):
        return dict.fromkeys(parameters, (world.local_rank,))
    node, found = world.nodes[world.node], {}
    mesh = _mesh_of(node, parameters)
    assert mesh is not None, "sharding_fault() has returned None"
    for name, parameter in parameters.items():
        divided = _divided(parameter, mesh, world.rank) or ()
        shared = [axis for axis in range(mesh.ndim) if axis not in divided]
        ranks = mesh[_along(mesh, world.rank, shared)].flatten().tolist()
        found[name] = tuple(sorted(map(node.index, ranks)))
    return found


def sharding_fault(model: nn.Module, tensors: Mapping[str, Tensor], world: World) -> str | None:
    """Return why parameters and buffers cannot be exchanged in shards, or None."""
    node = world.nodes[world.node]
    if len({len(node) for node in world.nodes}) > 1:
        return (
            f"the model is sharded on nodes of {[len(node) for node in world.nodes]} ranks, and "
            "each rank exchanges its shard with one rank of each other node; use equal nodes"
        )
    buffers, is_fsdp = dict(model.named_buffers()), bool(gathering_modules(model))
    whole = None if has_one_axis(tensors) else _mesh_of(node, tensors)
    found: dict[Any, tuple[int, ...]] = {}
    for name, tensor in tensors.items():
        if not is_sharded(tensor):
            if tensor.requires_grad and is_fsdp:
                return (
                    f"parameter {name!r} is not sharded, and others are; call fully_shard() on the "
                    "whole model after its blocks"
                )
            continue
        if name in buffers:
            return (
                f"buffer {name!r} is a DTensor, and the buffers of all ranks are averaged; "
                f"register it as a plain tensor, or pass ignore=[{name!r}]"
            )
        placements = tensor.placements  # type: ignore[attr-defined]
        if any(placement.is_partial() for placement in placements):
            return (
                f"parameter {name!r} has the placements {placements}: each rank holds a summand, "
                "and none the value; distribute it by Shard or Replicate"
            )
        mesh = tensor.device_mesh  # type: ignore[attr-defined]
        if mesh not in found:
            found[mesh] = _ranks_of(mesh, world)
        ranks = found[mesh]
        if ranks != node and (whole is None or not {*ranks} <= {*node}):
            return (
                f"parameter {name!r} is sharded over the ranks {[*ranks]}, and the node of this "
                f"rank is {list(node)}; shard over all ranks of a node and no others, "
                "fully_shard(model, mesh=mesh['local']), and pass mesh=mesh to replicate()"
            )
        if whole is not None and _divided(tensor, whole, world.rank) is None:
            return (
                f"parameter {name!r} lies on the ranks {[*ranks]}, and others on the mesh "
                f"{whole.tolist()}; distribute all parameters over axes of one mesh"
            )
    return None


def _ranks_of(mesh: Any, world: World) -> tuple[int, ...]:
    """Return the ranks over which ``mesh`` shards; all of them call."""
    if world.group is not None or mesh.ndim > 1:
        return tuple(mesh.mesh.flatten().tolist())
    # A process group per node counts its ranks from 0.
    return tuple(int(r) for (r,) in gather_numbers([world.rank], Group.of(mesh.get_group())))


def _mesh_of(node: Sequence[int], tensors: Mapping[str, Tensor]) -> Tensor | None:
    """Return the ranks of the mesh that a node is, with most axes; None if nothing lies on all."""
    meshes: list[Tensor] = [
        tensor.device_mesh.mesh  # type: ignore[attr-defined]
        for tensor in tensors.values()
        if is_sharded(tensor)
    ]
    every = [mesh for mesh in meshes if mesh.flatten().tolist() == [*node]]
    return max(every, key=lambda mesh: mesh.ndim, default=None)


def _divided(tensor: Tensor, mesh: Tensor, rank: int) -> list[int] | None:
    """Return the axes of a mesh along which a tensor is divided; None if it lies on another one."""
    if not is_sharded(tensor):
        return []
    own: Tensor = tensor.device_mesh.mesh  # type: ignore[attr-defined]
    for axes in combinations(range(mesh.ndim), own.ndim):
        if torch.equal(mesh[_along(mesh, rank, axes)], own):
            placed = zip(axes, tensor.placements, strict=True)  # type: ignore[attr-defined]
            return [axis for axis, placement in placed if not placement.is_replicate()]
    return None


def _along(mesh: Tensor, rank: int, axes: Sequence[int]) -> tuple[Any, ...]:
    """Return the index of the ranks at the place of ``rank`` in a mesh, along ``axes``."""
    place = (mesh == rank).nonzero()[0].tolist()
    return tuple(slice(None) if axis in axes else at for axis, at in enumerate(place))
