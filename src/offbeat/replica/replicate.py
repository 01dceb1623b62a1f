"""The entry point, which turns a model into a replica."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.optim import Optimizer

from offbeat.comm.collectives import broadcast
from offbeat.comm.failure import PeerLost
from offbeat.comm.group import Group, message_device
from offbeat.comm.process_group import default_group
from offbeat.comm.sharding import gathering_modules, has_shards, local_parameters, reshard
from offbeat.comm.small_gathers import raise_alike
from offbeat.comm.world import World
from offbeat.exchange import Algorithm
from offbeat.replica import survivors
from offbeat.replica.checks import require_shares, shards_fault
from offbeat.replica.connection import Connection
from offbeat.replica.joining import Joining, announce
from offbeat.replica.membership import Membership
from offbeat.replica.replica import Replica
from offbeat.replica.slots import SlotFiller
from offbeat.replica.start import connect, given_world


def replicate(
    model: nn.Module,
    algorithm: Algorithm,
    *,
    mesh: DeviceMesh | World | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    scaler: torch.amp.GradScaler | None = None,
    join: bool = False,
) -> Replica:
    r"""Connect ``model`` with its copies on all other ranks, in place: nothing is wrapped.

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
        join: True joins the run if one goes on, or else starts it together with the other ranks,
            which pass it too: one script serves the first start and a restart. For
            ``sgp(on_failure="continue")``, over a world made by :meth:`offbeat.World.at`.

            The others agree on a step without waiting, and let the new rank in before its
            exchange. One of them sends it the parameters, persistent buffers and half of its
            push-sum weight w, so that :math:`\sum x` and :math:`\sum w` stay as they are. Only
            that rank is late, by one model. ``replica.steps`` is the number of steps made so far,
            for schedules and data; the state of the optimizer begins anew. A rank that is lost
            meanwhile is survived, and the new rank tries again.

    Raises:
        ValueError: the same on all ranks, if anything differs between them or cannot be
            exchanged, or if there is no process group. Where a run goes on that a rank does not
            fit, on that rank alone.
        PeerLost: if a rank has ended, or does not call in time; names it.
    """
    given = (optimizer,) if isinstance(optimizer, Optimizer) else tuple(optimizer or ())
    filler = SlotFiller(algorithm, model, given, scaler, notes=[])
    run = 0
    if join:
        found = _join(model, algorithm, mesh, filler)
        if isinstance(found, Replica):
            return found
        run = found
    connection = connect(model, algorithm, mesh, given, run)
    world = connection.world
    try:
        if has_shards(model):
            raise_alike(shards_fault(model, algorithm, world), connection.control)
        require_shares(model, algorithm, world.nodes)
        if connection.links is not None:
            announce(connection.links, model, algorithm)
        copy_from_first(model, connection)
        return Replica(model, Membership(connection, filler))
    except BaseException as error:
        connection.close(ends_run=True)
        if isinstance(error, RuntimeError) and not isinstance(error, PeerLost):
            raise PeerLost(f"a rank did not call replicate(), or has failed: {error}") from error
        raise


def _join(
    model: nn.Module, algorithm: Algorithm, mesh: object, filler: SlotFiller
) -> Replica | int:
    """Return the replica of a rank that has joined, or the number of the run to start."""
    world = given_world(mesh) or World.of([range(default_group().size())])
    joining = Joining(world, model, algorithm)
    while True:
        found = joining.connect()
        if isinstance(found, int):
            return found
        assert found.links is not None, "a rank joins others"
        try:
            members = Membership(Connection.over(found.world, found.links), filler)
            members.take(model)
        except BaseException as error:
            survivors.resign(found.links)
            if isinstance(error, PeerLost):
                continue  # a rank was lost meanwhile: the others go on without it and this one
            raise
        replica = Replica(model, members)
        replica.step()  # the exchange of the step after which it has joined
        return replica


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
