"""The entry point, which turns a model into a replica."""

import os
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn
from torch.distributed import DeviceMesh
from torch.optim import Optimizer

from offbeat.attach.checks import digest_of, fingerprint, model_fault, require_shares, shards_fault
from offbeat.attach.connection import Connection
from offbeat.attach.slots import SlotFiller, reduced
from offbeat.attach.start import argument_fault, connect
from offbeat.elastic import survivors
from offbeat.elastic.generation import Generation
from offbeat.elastic.join import PRESENT, JoinAttempts, announce, tell, tell_model
from offbeat.elastic.join_barrier import donor_in
from offbeat.elastic.joining import join
from offbeat.elastic.node import Node, takes_part_as_nodes
from offbeat.exchange import Algorithm, Exchanged
from offbeat.exchange.samples import Samples
from offbeat.kernels.dispatch import load_kernels
from offbeat.liveness.failure import PeerLost
from offbeat.recipes.composed import compose
from offbeat.replica.replica import Replica
from offbeat.transport.collectives import copy_from_first
from offbeat.transport.links import connections
from offbeat.transport.run.rendezvous import VARIABLE
from offbeat.transport.small_gathers import raise_alike
from offbeat.transport.world import World

Result = TypeVar("Result")


def replicate(
    model: nn.Module,
    algorithm: Algorithm,
    *,
    mesh: DeviceMesh | World | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    scaler: torch.amp.GradScaler | None = None,
    ignore: Collection[str | nn.Module] = (),
    elastic: bool = False,
    weighted: bool = False,
    connections: int | None = None,
) -> Replica:
    r"""Connect ``model`` with its copies on all other ranks, in place: nothing is wrapped.

    Checks that all ranks hold the same model (names, shapes, dtypes, frozen parameters) and the
    same algorithm, and copies the parameters and buffers of rank 0 to all ranks. All ranks call; a
    rank that is late is waited for until the timeout of the process group, with a warning after
    15 seconds. The first rank warns if the method becomes another one on these nodes.
    ``replica.notes`` says which slots are disabled, and what follows for the method from an
    optimizer or a scaler that was not given.

    Args:
        model: any module with trainable, dense parameters on one device.
        algorithm: what :func:`offbeat.sgp` and the other recipes return.
        mesh: the assignment of ranks to nodes, as a DeviceMesh with the axes
            ``("node", "local")`` or an :class:`offbeat.World`; by default
            :meth:`offbeat.World.from_env` where ``OFFBEAT_STORE`` is set, else the ranks of one
            ``OFFBEAT_NODE``, of one torchrun or of one host.
        optimizer: read by methods that depend on the learning rate, ``lags`` and ``slgs``; in an
            elastic run its state is handed over to ranks that join.
        scaler: read by methods that depend on the loss scale: ``lags`` and ``slgs``; handed over
            likewise.
        ignore: names of parameters, buffers and modules, or modules, that stay this rank's own:
            they are not copied from rank 0, exchanged or averaged. The same on all ranks. Extends
            what ``DistributedDataParallel._set_params_and_buffers_to_ignore_for_model`` was given.
        elastic: True lets the run go on when ranks are lost, for every recipe but
            ``torch_ddp()``, ``lags()`` with measured densities and ``adasum(partition=True)``. The
            launcher must keep the others alive, and the store must not run on the lost rank. An
            exchange is a transaction: the ranks that are left make it again among themselves, with
            the gradients and parameters that each has computed, so that none of their batches is
            lost; or all of them keep its result, if one does. Means are then over the ranks that
            are left. With ``within="local"``, or if its ranks hold shards of one model, a node is
            lost with any of them. One small gather more in an exchange whose result ranks cannot
            hand over (weights, nodes, 16 bits, delays, among others).

            Over a world made by :meth:`offbeat.World.at`, whose ranks meet in a store outside of
            them all, it also lets ranks join: one script serves the first start and a restart. All
            agree on a step without waiting, and let the new rank in before its exchange. One of
            them, not always the same, hands over the parameters, the persistent buffers, the state
            of ``optimizer`` and ``scaler``, what :meth:`Replica.register` got, and what the method
            shares; residuals begin with zero, and of a push-sum weight the new rank gets a half.
            ``replica.steps`` is the number of steps made so far. Such a node joins with all ranks.
        weighted: True lets :meth:`Replica.set_weight` say how many samples the steps of a rank
            stand for, and :meth:`Replica.uneven` let ranks run out of data. One small gather more
            in every exchange.
        connections: how many connections of Gloo two ranks of different nodes have in each process
            group, from 1 to 64: among them they divide messages of more than 64 KiB for each. 8 on
            far links that lose packets; by default ``OFFBEAT_CONNECTIONS``, or 1.

    Raises:
        ValueError: the same on all ranks, if anything differs between them or cannot be
            exchanged, or if there is no process group. Where a run goes on that a rank does not
            fit, on that rank alone.
        PeerLost: if a rank has ended, or does not call in time; names it.
    """
    if mesh is None and VARIABLE in os.environ:
        mesh = World.from_env(elastic=elastic)
    if isinstance(mesh, World) and mesh.is_new and not elastic:
        raise ValueError(
            "this rank is new: a run goes on that it takes no part in; pass elastic=True to "
            "replicate() too"
        )
    given = (optimizer,) if isinstance(optimizer, Optimizer) else tuple(optimizer or ())
    exchanged = Exchanged(model, ignore)
    samples = Samples() if weighted else None
    filler = SlotFiller(
        *(algorithm, exchanged, given, scaler, [], elastic),
        samples=samples,
        connections=connections,
    )
    if isinstance(algorithm, Algorithm) and (algorithm.auto or algorithm.then):
        for device in {parameter.device for parameter in exchanged.trained.values()}:
            load_kernels(device)  # before others wait for this rank
    replica = _attach(filler, mesh)
    world = replica.world
    if world.rank == world.ranks[0] and (text := reduced(algorithm, world, mesh)):
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    return replica


def _attach(filler: SlotFiller, mesh: DeviceMesh | World | None) -> Replica:
    model = filler.model
    run, node, is_sound = 0, None, not argument_fault(filler)
    if is_sound:
        model.reshard()  # an evaluation may have left gathered copies in place of shards
    in_shards = filler.is_elastic and is_sound and model.is_sharded
    as_nodes = filler.is_elastic and takes_part_as_nodes(filler.algorithm) and not in_shards
    # Without a process group, whose ranks are fixed, one script serves a start and a restart.
    if filler.is_elastic and isinstance(mesh, World) and mesh.group is None:
        mesh = replace(mesh, connections=connections(filler.connections)) if is_sound else mesh
        node = Node.meet(mesh) if as_nodes or in_shards else None
        attempts = JoinAttempts(mesh, filler, compose)
        if node is None:
            found = _join_run(attempts, None)
        else:
            found = (_join_in_shards if in_shards else _join_as_node)(attempts, node)
        if isinstance(found, Generation):
            replica = Replica(found)
            replica._end_step()  # the exchange of the step after which it has joined
            replica._let_go()  # after which another may leave
            replica._go_on()  # and the others may switch
            replica.is_new = True
            return replica
        run = found
    connection = connect(filler, mesh, run, node.meter if node else None)
    world = connection.world
    try:
        if in_shards:
            connection = replace(connection, mates=node or Node.of(connection))
        if model.is_sharded:
            raise_alike(shards_fault(filler, world), connection.control)
        require_shares(filler, world.nodes)
        if as_nodes and connection.links is not None:
            return Replica(_divide(connection, node or Node.of(connection), filler))
        if connection.links is not None:
            announce(connection.links, filler)
        copy_from_rank0(model, connection)
        return Replica(Generation(connection, filler))
    except BaseException as error:
        connection.close(ends_run=True)
        if connection.mates is not None:
            connection.mates.close()
        if isinstance(error, RuntimeError) and not isinstance(error, PeerLost):
            raise PeerLost(f"a rank did not call replicate(), or has failed: {error}") from error
        raise


def _divide(everyone: Connection, node: Node, filler: SlotFiller) -> Generation:
    """Connect the nodes by their first ranks, and close the connection of all ranks; all call."""
    between = Connection(everyone.world, None, None)

    def connect() -> None:
        nonlocal between
        if node.is_first and everyone.links is not None:
            links = everyone.links.between_nodes()
            between = Connection(links.world, links, None)
            announce(links, filler)
            between = between.open()
        found.append(Generation(between, filler, node))

    found: list[Generation] = []
    try:
        _as_one(node, connect, filler.model)
        copy_from_rank0(filler.model, everyone)
    except BaseException:
        between.close(ends_run=True)
        raise
    everyone.close()
    return found[0]


def _join_as_node(joining: JoinAttempts, node: Node) -> Generation | int:
    """Return what :func:`_join_run` does, on each rank of a node that is one participant."""
    filler = joining.filler
    found: list[Generation | int] = []

    def join_first() -> tuple[int, int]:
        if not node.is_first:
            return 0, 0
        world = joining.world.between_nodes()
        one = replace(joining, world=world, meter=node.meter, fault=fault)
        found.append(_join_run(one, node))
        return (found[0], 0) if isinstance(found[0], int) else (0, found[0].steps)

    fault = _fault_inside(node, filler)
    try:
        run, steps = _as_one(node, join_first, None if fault else filler.model)
        if run:
            return run
        if not node.is_first:
            found.append(Generation(Connection(joining.world, None, None), filler, node))
        assert isinstance(found[0], Generation), "it has joined"
        found[0].steps = steps
        _tell(node, found[0])
    except BaseException:
        for joined in found:  # the others must not wait for what is left of this node
            if isinstance(joined, Generation) and joined.connection.links is not None:
                survivors.resign(joined.connection.links)
        raise
    return found[0]


def _tell(node: Node, members: Generation) -> None:
    """Copy what the first rank of a node has joined with to the others."""
    filler = members.filler
    changes, nodes = [members.lost, members.joined], [*members.connection.world.ranks]
    told = {"registered": filler.received, "changes": changes, "nodes": nodes}
    state = node.copy_state({**filler.common(), **told})
    if not node.is_first:
        members.lost[:], members.joined[:] = state["changes"]
        node.go_on(state["nodes"], node.everyone.node)
        filler.begin_with(state)


def _join_in_shards(joining: JoinAttempts, node: Node) -> Generation | int:
    """Return what :func:`_join_run` does, on each rank of a node that holds shards of one model."""
    try:
        fault = _fault_inside(node, joining.filler)
        fault = fault or node.first_fault(shards_fault(joining.filler, node.world))
        return _join_run(replace(joining, mates=node, meter=node.meter, fault=fault), None)
    except BaseException:
        node.close()
        raise


def _fault_inside(node: Node, filler: SlotFiller) -> str | None:
    """Return why the ranks of the node cannot take part together, or None; all of them call."""
    fault = node.first_fault(argument_fault(filler) or model_fault(filler.model))
    if fault is not None or len({*node.gather(digest_of(fingerprint(filler, "")))}) == 1:
        return fault
    return (
        f"the ranks {list(node.world.nodes[node.world.node])} of a node differ in model, algorithm "
        "or version; use the same ones on all ranks"
    )


def _as_one(node: Node, call: Callable[[], Result], model: Exchanged | None) -> Result:
    """Return what ``call`` returns on the first rank of the node; raise on all if it does."""
    tensors = [*(model.parameters | model.buffers).values()] if model is not None else []
    try:
        with node.calling("replicate"):
            return node.together("replicate", call, (), tensors)
    except BaseException:
        node.close()
        raise


def _join_run(joining: JoinAttempts, node: Node | None) -> Generation | int:
    """Return who takes part in the run that this rank has joined, or the number of one to start."""
    filler = joining.filler
    while True:
        found = joining.connect()
        if isinstance(found, int):
            return found
        assert found.links is not None, "a rank joins others"
        try:
            with found.alike():
                pair = found.world.rank, donor_in(found.links)
                present = found.links.store.get(PRESENT).decode()
                if present != repr(filler.algorithm):  # they have switched
                    filler = replace(filler, algorithm=compose(present))
                members = Generation(found.open(pair), filler, node, joins=True)
                filler.model.reshard()
                join(members, filler.model)
                tell_model(found.links, joining.filler)
                tell(found.links, PRESENT, present)
        except BaseException as error:
            survivors.resign(found.links)
            is_over = found.mates is not None and found.mates.is_lost
            if isinstance(error, PeerLost) and not is_over:
                continue  # a rank was lost meanwhile: the others go on without it and this one
            raise
        return members


def copy_from_rank0(model: Exchanged, connection: Connection) -> None:
    """Copy the parameters and buffers of the first rank to the others; all ranks call.

    Shards come from the rank of the first node that holds the same ones.
    """
    if connection.links is None:
        return
    model.reshard()
    control = connection.control
    group = connection.links.open("node", peers=()) if model.is_sharded else control
    for tensors, joins in ((model.held, group), (model.buffers, control)):
        if joins is not None:
            copy_from_first(tensors.values(), joins)
