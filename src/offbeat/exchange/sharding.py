"""Parameters that FSDP2 has divided among the ranks of a node."""

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.transport.group import Group
from offbeat.transport.small_gathers import gather_numbers
from offbeat.transport.world import World

_PART = "part of a sharded tensor"


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor, of which each rank holds a part."""
    # A model with a DTensor has imported its module; importing it here takes a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_flattened(model: nn.Module) -> bool:
    """Return whether FSDP1 holds parameters of a model, which have no shapes of their own."""
    module = sys.modules.get("torch.distributed.fsdp")
    if module is None:
        return False
    return any(isinstance(m, module.FullyShardedDataParallel) for m in model.modules())


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
    """Return a tensor that is sharded as ``like``, and of which this rank holds ``part``.

    Made as FSDP2 makes its gradients. ``from_local`` would copy those of parameters that are
    offloaded to the CPU to the device of the mesh.
    """
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


def version(tensor: Tensor) -> int:
    """Return a number that every write in place increments.

    Optimizers and scripts write to a DTensor, which does not count for the part that this rank
    holds; FSDP2 accumulates gradients in the part, which does not count for the DTensor.
    """
    part = held_part(tensor)
    return tensor._version if part is tensor else tensor._version + part._version


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor gathered from its parts, on all ranks of the node, which all call."""
    gather: Any = getattr(tensor, "full_tensor", None)
    full: Tensor = gather() if gather is not None else tensor
    return full


def gathering_modules(model: nn.Module) -> list[Any]:
    """Return the modules to which ``fully_shard`` was applied."""
    module = sys.modules.get("torch.distributed.fsdp")
    return [m for m in model.modules() if module is not None and isinstance(m, module.FSDPModule)]


def reshard(modules: Iterable[Any]) -> None:
    """Free the gathered copies of parameters, before their shards are written.

    FSDP2 keeps those of the root after a forward without a backward, as in an evaluation. The next
    forward would use them, and not what was written.
    """
    for module in modules:
        module.reshard()


def sharding_fault(parameters: Mapping[str, Tensor], world: World) -> str | None:
    """Return why parameters cannot be exchanged in shards, or None."""
    if not any(map(is_sharded, parameters.values())):
        return None
    if len({len(node) for node in world.nodes}) > 1:
        return (
            f"the model is sharded on nodes of {[len(node) for node in world.nodes]} ranks, and "
            "each rank exchanges its shard with one rank of each other node; use equal nodes"
        )
    found: dict[Any, tuple[int, ...]] = {}
    for name, parameter in parameters.items():
        if not is_sharded(parameter):
            if parameter.requires_grad:
                return (
                    f"parameter {name!r} is not sharded, and others are; call fully_shard() on the "
                    "whole model after its blocks"
                )
            continue
        placements = parameter.placements  # type: ignore[attr-defined]
        if len(placements) != 1 or not placements[0].is_shard():
            return (
                f"parameter {name!r} has the placements {placements}, expected one Shard inside "
                "the node; use fully_shard(model, mesh=mesh['local']) and no tensor parallelism"
            )
        mesh = parameter.device_mesh  # type: ignore[attr-defined]
        if mesh not in found:
            found[mesh] = _ranks_of(mesh, world)
        if (ranks := found[mesh]) != world.nodes[world.node]:
            return (
                f"parameter {name!r} is sharded over the ranks {[*ranks]}, and the node of this "
                f"rank is {list(world.nodes[world.node])}; shard inside the node, "
                "fully_shard(model, mesh=mesh['local']), and pass mesh=mesh to replicate()"
            )
    return None


def _ranks_of(mesh: Any, world: World) -> tuple[int, ...]:
    """Return the ranks over which ``mesh`` shards; all of them call."""
    if world.group is not None:
        return tuple(mesh.mesh.flatten().tolist())
    # A process group per node counts its ranks from 0.
    return tuple(int(r) for (r,) in gather_numbers([world.rank], Group.of(mesh.get_group())))
