"""A rank that leaves a run: the others know the step, and it shares out what it alone holds."""

from dataclasses import replace

import torch
from torch import Tensor

from offbeat.elastic import survivors
from offbeat.elastic.agreement import Agreement
from offbeat.elastic.generation import Generation
from offbeat.elastic.join_barrier import barrier_of, pass_barrier
from offbeat.transport.collectives import all_reduce
from offbeat.transport.group import message_device


def let_go(members: Generation, steps: int) -> list[str]:
    """Let a rank or node leave after ``steps`` if all have agreed; return lines for the log.

    It does so at the end of the first step after the agreement in which all have exchanged, so
    that nothing of its work is lost that is not in flight. What it has not sent is divided between
    the others. Bytes sent: 2 (n-1)/n of the tensors that hold it, none under most methods.
    """
    is_last = members.world.size == 1 if members.node is None else len(members.world.nodes) == 1
    if members.admission.wants_to_leave and is_last:
        members.has_left = True  # nobody is left to exchange with, or to share out to
        return [f"{members.unit} {members.world.rank} has left after {steps} steps, as the last"]
    links, request = members.connection.links, members.admission.due(joins=False)
    if links is None or request is None:
        return []
    if members.committed_in != steps - 1 and not members.starts_anew:
        return []
    world, units = links.world, members.connection.units or [(rank,) for rank in links.world.ranks]
    leaving = next(tuple(unit) for unit in units if request.rank in unit)
    leaves = world.rank in leaving
    with links.heartbeat.verb("step"):
        members.parameters.drain()
        if members.has_reconnected:
            return []
        shares = _shares(members, leaves)
        # Who goes on says so in the old links: nobody may still wait there, or be without a share.
        barrier = barrier_of(links.store, links.name, request.number)
        if not pass_barrier(barrier, links, lambda: False):
            links.heartbeat.look_for_agreed_error()  # of which another rank may have heard first
    if leaves:
        links.close()
        alone = world.among(leaving)
        members.connection = replace(members.connection, world=alone, links=None, control=None)
        members.has_left = True
        return [f"{members.unit} {world.rank} has left after {steps} steps"]
    living = tuple(rank for rank in world.ranks if rank not in leaving)
    place, earlier = members.progress._replace(steps=steps), members.connection
    weight = _add(members, shares)
    between = survivors.regroup(links, Agreement(living, leaving, steps))
    current = replace(earlier, world=world.among(living), links=between, control=None)
    found = survivors.connect_over(current, earlier, members.filler, place, [], members.made)
    entry = {"step": steps - 1, "used": members.progress.used, "left": 1}
    members.lost.extend(each for rank in leaving for each in members.entries(rank, **entry))
    texts = members.adopt(found)
    members.parameters.restart(weight)
    return [
        f"{members.unit} {world.rank}: {members.unit}s {list(leaving)} have left after {steps} "
        f"steps; {list(living)} train on",
        *texts,
    ]


def _shares(members: Generation, leaves: bool) -> list[list[Tensor]]:
    """Return each slot's part of what the leaving rank has not sent, for one of the others."""
    found: list[list[Tensor]] = []
    for slot in members.slots:
        # Of a sharded model only counterparts hold the same part.
        site = slot.site if members.connection.mates is not None else None
        group = members.control if site is None else site.group or members.control
        found.append([])
        for tensor in slot.unsent():
            share = tensor if leaves else torch.zeros_like(tensor)
            share = share.to(message_device(group, tensor.device))
            all_reduce(share, group).wait()
            found[-1].append(share.div_(group.size - 1))
    return found


def _add(members: Generation, shares: list[list[Tensor]]) -> float:
    """Add the shares; return the weight of this rank."""
    for slot, parts in zip(members.slots, shares, strict=True):
        if parts:
            slot.add_unsent(parts)
    return members.parameters.drain()
