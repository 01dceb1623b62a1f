"""The entry point, which turns a model into a replica."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.optim import Optimizer

from offbeat.comm.collectives import broadcast
from offbeat.comm.failure import PeerLost
from offbeat.comm.group import Group, message_device
from offbeat.comm.sharding import gathering_modules, has_shards, local_parameters, reshard
from offbeat.comm.small_gathers import raise_alike
from offbeat.comm.world import World
from offbeat.exchange import Algorithm
from offbeat.replica.checks import require_shares, shards_fault
from offbeat.replica.connection import Connection
from offbeat.replica.replica import Replica
from offbeat.replica.slots import SlotFiller
from offbeat.replica.start import connect


def replicate(
    model: nn.Module,
    algorithm: Algorithm,
    *,
    mesh: DeviceMesh | World | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> Replica:
    """Connect ``model`` with its copies on all other ranks, in place: nothing is wrapped.

    Checks that all ranks hold the same model (names, shapes, dtypes, frozen parameters) and the
    same algorithm, and copies the parameters and buffers of rank 0 to all ranks. All ranks call; a
    rank that is late is waited for until the timeout of the process group, with a warning after
    15 seconds. ``replica.notes`` says which slots are disabled, and what follows for the method
    from an optimizer or a scaler that was not given.

    Args:
        model: any module with trainable, dense parameters on one device.
        algorithm: what :func:`offbeat.sgp` and the other recipes return.
        mesh: the assignment of ranks to nodes, as a DeviceMesh with the axes
            ``("node", "local")`` or an :class:`offbeat.World`; by default the nodes of torchrun,
            or else of the host names.
        optimizer: read by methods that depend on the learning rate: ``lags`` and ``slgs``.
        scaler: read by methods that depend on the loss scale: ``lags`` and ``slgs``.

    Raises:
        ValueError: the same on all ranks, if anything differs between them or cannot be
            exchanged, or if there is no process group.
        PeerLost: if a rank has ended, or does not call in time; names it.
    """
    given = (optimizer,) if isinstance(optimizer, Optimizer) else tuple(optimizer or ())
    connection = connect(model, algorithm, mesh, given)
    world = connection.world
    try:
        if has_shards(model):
            raise_alike(shards_fault(model, algorithm, world), connection.control)
        require_shares(model, algorithm, world.nodes)
        copy_from_first(model, connection)
        return Replica(model, connection, SlotFiller(algorithm, model, given, scaler, notes=[]))
    except BaseException as error:
        connection.close()
        if isinstance(error, RuntimeError) and not isinstance(error, PeerLost):
            raise PeerLost(f"a rank did not call replicate(), or has failed: {error}") from error
        raise


def copy_from_first(model: nn.Module, connection: Connection) -> None:
    """Copy all parameters and buffers of the first rank to the others; all ranks call.

    Shards come from the rank of the first node that holds the same ones.
    """
    if connection.links is None:
        return
    held, buffers = local_parameters(model), [*model.buffers()]
    reshard(gathering_modules(model))
    if has_shards(model):
        _copy(held.values(), connection.links.open("node", peers=()))
        _copy(buffers, connection.control)
    else:
        _copy([*held.values(), *buffers], connection.control)


def _copy(tensors: Iterable[Tensor], group: Group | None) -> None:
    if group is None:
        return
    for tensor in tensors:
        message = tensor.detach().to(message_device(group, tensor.device)).contiguous()
        broadcast(message, 0, group).wait()
        if group.rank != 0:
            tensor.detach().copy_(message)
