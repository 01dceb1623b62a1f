"""Another method from the next step on: the same ranks, over the same links, with other slots."""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import final

from offbeat.attach.connection import Connection
from offbeat.elastic.generation import Generation
from offbeat.elastic.join import PRESENT, tell
from offbeat.exchange import Algorithm, BoundGradients, BoundParameters
from offbeat.liveness.failure import PeerLost
from offbeat.transport.group import Group
from offbeat.transport.links import Links
from offbeat.transport.messages import widen
from offbeat.transport.world import Axis, World


@final
@dataclass(frozen=True)
class Reused:
    """Links that hand out groups of exchanges that have ended, instead of opening others.

    Where all members are connected, or collectives are all that is asked for, for which the same
    ones are in every group over an axis: on all ranks alike. Others would take several round trips.
    """

    links: Links
    free: list[Group]
    peers: dict[Group, Collection[int]]  # with whom this rank exchanges messages, where not all

    @property
    def world(self) -> World:
        """The layout of ranks on nodes."""
        return self.links.world

    def open(self, axis: Axis, peers: Collection[int] | None = None) -> Group | None:
        """Return a free group over ``axis``, or a new one; all ranks must call."""
        group = self._free(axis, peers) or self.links.open(axis, peers)
        if group is not None and peers is not None:
            self.peers[group] = peers
        return group

    def _free(self, axis: Axis, peers: Collection[int] | None) -> Group | None:
        for group in self.free:
            is_full = group.connected is None or group.is_mesh
            serves = is_full or (peers is not None and not peers)
            if serves and group.axis == axis and group in self.links.opened:
                next(self.links.numbers)  # as on ranks that are in no such group
                self.free.remove(group)
                group.alike.clear()
                return group
        return None


def switch(
    members: Generation, algorithm: Algorithm, leave: Callable[[], None], is_far: bool
) -> None:
    """Fill the slots by ``algorithm``; all ranks call, between two steps.

    An exchange that both algorithms have goes on undisturbed. Before another one comes, ``leave``
    merges what is in flight and makes models equal, where that is necessary. If a rank is lost
    meanwhile, all others have switched, or none has. ``is_far``: whether any of them is far away.
    """
    before, filler = members.algorithm, replace(members.filler, algorithm=algorithm)
    parameters, gradients = members.parameters, members.gradients
    replaced: list[BoundParameters | BoundGradients] = []
    leave()
    if algorithm.parameters != before.parameters:
        replaced.append(parameters)
    if algorithm.gradients != before.gradients:
        replaced.append(gradients)
    links, control = members.connection.links, members.connection.control
    kept = [slot for slot in (parameters, gradients) if slot not in replaced]
    peers: dict[Group, Collection[int]] = {}
    over = partial(Reused, free=_unused(members.connection, kept), peers=peers)
    with _telling_all(members, algorithm):
        if parameters in replaced:
            parameters = members.filled_parameters(filler, over)
            parameters.reset()  # in a run with weights, samples count from here
            for group in peers if is_far else ():
                widen(peers[group], group)
        if gradients in replaced:
            gradients = members.filled_gradients(filler, over)
            gradients.carry(members.gradients)
    if links is not None:
        tell(links, PRESENT, repr(algorithm))  # a rank that joins reads it once it is let in
    # Where any exchange finds its groups among those of others, what is left waits for the next.
    keeps = control is None or (control.is_mesh and not filler.is_elastic)
    if not keeps:
        members.agree_on(filler)
    members.take_over(filler, (parameters, gradients))
    members.notes[:] = dict.fromkeys(members.notes)
    members.switches.append({"step": members.progress.steps, "algorithm": str(algorithm)})
    for slot in replaced:
        slot.detach()
    if links is not None and not keeps:
        # All ranks are here: a socket that closes discards what is not read.
        links.drop(_unused(members.connection, (parameters, gradients)))


@contextmanager
def _telling_all(members: Generation, algorithm: Algorithm) -> Iterator[None]:
    # The others have no word of a rank that goes on with the algorithm before, until a message of
    # it meets one of the next.
    try:
        yield
    except (ValueError, PeerLost):  # which all ranks raise
        raise
    except Exception as error:
        text = f"rank {members.world.rank} could not switch to {algorithm}: {error}"
        raise members.report_error(PeerLost(text)) from error


def _unused(
    connection: Connection, slots: Iterable[BoundParameters | BoundGradients]
) -> list[Group]:
    """Return the open groups that none of ``slots`` uses, in the order of their opening."""
    used = [connection.control]
    for slot in slots:
        used += slot.site.groups if slot.site is not None else []
    opened = connection.links.opened if connection.links is not None else []
    return [group for group in opened if group not in used]
