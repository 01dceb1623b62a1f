"""The ranks of a node as one participant: the first of them takes part in the run for all.

A loss ends a whole node, and a whole node comes back. So no backward of another one is disturbed,
and its ranks cannot disagree about who takes part: they hear it from the first one.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast, final

from torch import Tensor

from offbeat.attach.connection import Connection, marked
from offbeat.attach.node_start import meet
from offbeat.elastic.portable import put_together, room_for, taken_apart
from offbeat.exchange import Algorithm
from offbeat.liveness.failure import PeerLost
from offbeat.liveness.heartbeats.heartbeat import Heartbeat
from offbeat.liveness.heartbeats.status_record import AgreedError
from offbeat.transport.collectives import copy_from_first
from offbeat.transport.group import Group
from offbeat.transport.links import Links
from offbeat.transport.meter import Meter
from offbeat.transport.small_gathers import gather_bytes, gather_numbers
from offbeat.transport.world import World

Result = TypeVar("Result")


def takes_part_as_nodes(algorithm: object) -> bool:
    """Return whether an elastic run of ``algorithm`` loses and gains whole nodes, not ranks."""
    exchange = algorithm.parameters if isinstance(algorithm, Algorithm) else None
    return exchange is not None and exchange.over == "node"


@final
@dataclass(eq=False)
class Node:
    """Connects the ranks of one node, apart from the connection between the nodes.

    Attributes:
        everyone: the layout of all ranks, also of nodes that are lost.
        world: the layout of the ranks that take part at present.
        links: the links inside the node; None where it has one rank.
        control: the group of its ranks, for what the first one tells; None likewise.
        meter: counters, for the links between the nodes too.
        wants_to_leave: whether this rank does.
        lets_go: whether a node waits to leave, as all ranks of this one know since their last step.
        is_leaving: the same of this node.
    """

    everyone: World
    world: World
    links: Links | None
    control: Group | None
    meter: Meter = field(default_factory=Meter)
    wants_to_leave: bool = False
    lets_go: bool = False
    is_leaving: bool = False
    _known: float = -1.0  # the number of losses and joins of which the others know

    @classmethod
    def meet(cls, world: World) -> "Node":
        """Connect the ranks of this node, which were started together; all of them call."""
        mates = world.nodes[world.node]
        if len(mates) == 1:
            return cls._over(world, None, Meter())
        store = world.timed_store()
        try:
            start = meet(store, world.rank, mates)
        finally:
            store.close()
        return cls._over(world, f"start {start}", Meter())

    @classmethod
    def of(cls, connection: Connection) -> "Node":
        """Connect the ranks of this node, of all that are connected; all of them call."""
        name = connection.links.name if connection.links is not None else None
        return cls._over(connection.world, name, connection.meter)

    @classmethod
    def _over(cls, world: World, place: str | None, meter: Meter) -> "Node":
        if place is None or len(world.nodes[world.node]) == 1:
            return cls(world, world, None, None, meter)
        links = Links.inside(world, place, meter)
        return cls(world, world, links, links.open("local", peers=()), meter)

    @property
    def is_first(self) -> bool:
        """Whether this rank takes part in the run for its node."""
        return self.world.local_rank == 0

    @property
    def is_lost(self) -> bool:
        """Whether one of its ranks is."""
        return self.links is not None and self.links.heartbeat.has_agreed_error

    @contextmanager
    def calling(self, verb: str) -> Iterator[None]:
        """Mark this rank as inside the call ``verb`` of its node."""
        if self.links is None:
            yield
            return
        with self.links.heartbeat.verb(verb):
            yield
        self.links.heartbeat.next_call(verb)

    @contextmanager
    def resigning(self, resign: Callable[[], None]) -> Iterator[None]:
        """If a rank of the node is lost, ``resign`` from the run of nodes, and tell the others."""
        try:
            yield
        except PeerLost as loss:
            resign()
            raise self.report_error(loss) from loss

    def attending(self) -> AbstractContextManager[None]:
        """Notice the loss of a rank of the node during a wait for others."""
        return nullcontext() if self.links is None else self.links.heartbeat.attending()

    def report_error(self, error: Exception) -> Exception:
        """Make ``error`` that of all ranks of the node, and return the one that stands."""
        return error if self.links is None else self.links.heartbeat.report_error(error)

    def close(self) -> None:
        """End the threads and the groups."""
        if self.links is not None:
            self.links.close()

    def know(self, numbers: Sequence[int]) -> None:
        """Note the ranks of new nodes, before they take part: they may be lost as they join."""
        while max(numbers) >= len(self.everyone.nodes):
            self.everyone = self.everyone.joined_by(sum(map(len, self.everyone.nodes)))

    def go_on(self, numbers: Sequence[int], own: int) -> None:
        """Note the numbers of the nodes that take part from now on, and of this one.

        A new node has one rank, and learns its number as it joins.
        """
        local_rank = self.world.local_rank
        self.know(numbers)
        self.everyone = replace(self.everyone, rank=self.everyone.nodes[own][local_rank])
        self.world = self.everyone.among(
            [r for number in numbers for r in self.everyone.nodes[number]]
        )

    def tell(self, word: object) -> Any:
        """Return what the first rank passes; all call."""
        text = json.dumps(word if self.is_first else None).encode()
        return json.loads(gather_bytes(text, self.control)[0])

    def copy_state(self, state: Any) -> Any:
        """Return copies of what the first rank passes, numbers, text and tensors; all call."""
        if self.control is None:
            return state
        text, tensors = taken_apart(state if self.is_first else None)
        text = self.tell(text)
        tensors = tensors if self.is_first else room_for(text)
        copy_from_first([tensor for tensor in tensors if tensor.numel() > 0], self.control)
        return put_together(text, tensors)

    def first_fault(self, fault: str | None) -> str | None:
        """Return the fault of the first rank that has one; all call."""
        if self.control is None:
            return fault
        ranks = zip(self.control.ranks, self.gather(fault or ""), strict=True)
        return next((f"rank {rank}: {text}" for rank, text in ranks if text), None)

    def gather(self, text: str) -> list[str]:
        """Return what every rank of the node passes; all call."""
        return [said.decode() for said in gather_bytes(text.encode(), self.control)]

    def together(
        self,
        verb: str,
        call: Callable[[], Result],
        changes: Sequence[list[dict[str, int]]],
        parameters: Sequence[Tensor],
        buffers: Callable[[], Mapping[str, Tensor]] = dict,
        lets_go: Callable[[], bool] = lambda: False,
    ) -> Result:
        """Make a call with the other nodes on the first rank; return its result on all.

        The others make it too, alone; then they take over the parameters of the first one, and its
        ``changes``, the nodes that were lost or have joined. What ``buffers`` returns goes along
        with all but a usual step. ``lets_go``: whether this rank knows of a node that waits to
        leave. An error of one rank is raised on all. Bytes sent inside the node: 128 and a model to
        each other rank.
        """
        result: Any = None
        fault: Exception | None = None
        try:
            result = call()
        except (ValueError, PeerLost) as error:
            fault = error
        # Asked once the step is counted: a node that heard in it has promised to look at its end.
        word = sum(map(len, changes)), fault is not None, lets_go(), self.wants_to_leave
        said = [word] if self.control is None else gather_numbers(word, self.control)
        self.is_leaving = any(wants for *_, wants in said)
        self.lets_go = self.is_leaving or any(knows for *_, knows, _ in said)
        if self.control is None:
            if fault is not None:
                raise fault
            return cast(Result, result)
        if any(failed for _, failed, *_ in said):
            raise self._first_error(fault, self.control)
        if verb != "step" or said[0][0] != self._known:
            self._known = said[0][0]
            own = dict(buffers())
            here = changes, self.world.ranks, len(self.everyone.nodes), taken_apart(own)[0], result
            told, ranks, count, kinds, result = self.tell(here)
            self.know([count - 1])
            self.world = self.everyone.among(ranks)
            for mine, of_first in zip(changes, told, strict=True):
                mine[:] = of_first
            parameters = [*parameters, *_in_place_of(put_together(kinds, room_for(kinds)), own)]
        copy_from_first(parameters, self.control)
        return cast(Result, result)

    def alone(self, call: Callable[[], Result], between: Callable[[], Heartbeat | None]) -> Result:
        """Make a call that not all ranks of the node make; an error of the run ends theirs too.

        ``between`` returns the heartbeat between the nodes: the others would wait for this rank in
        a call that it does not come to.
        """
        try:
            return call()
        except ValueError as error:
            if self.links is None or not _is_over(between()):
                raise
            raise self.report_error(error) from error

    def concur(self, fault: Exception | None) -> None:
        """Raise on all ranks of the node what one has found, a loss if nothing else; all call."""
        if self.control is None:
            return
        if any(failed for (failed,) in gather_numbers([fault is not None], self.control)):
            # A new error: a heartbeat raises the same one in a later call again.
            raise marked(AgreedError.of(self._first_error(fault, self.control)).error) from fault

    def _first_error(self, own: Exception | None, control: Group) -> Exception:
        text = json.dumps(own and AgreedError.of(own)).encode()
        said = [AgreedError(*word) for word in map(json.loads, gather_bytes(text, control)) if word]
        first = min(said, key=lambda error: error.kind == "lost")  # which may be survived
        return own if own is not None and AgreedError.of(own) == first else first.error


def _in_place_of(rooms: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """Yield ``rooms`` for the buffers of the first rank, or this one's own where they are alike.

    Those that are not persistent may be caches of other shapes, which each rank keeps.
    """
    for name, room in rooms.items():
        mine = own.get(name, room)
        is_alike = (mine.shape, mine.dtype) == (room.shape, room.dtype)
        yield mine if is_alike else room


def _is_over(heartbeat: Heartbeat | None) -> bool:
    """Whether the ranks have agreed on an error that none of them survives."""
    try:
        if heartbeat is not None:
            heartbeat.raise_agreed_error()
    except (ValueError, PeerLost) as error:
        return isinstance(error, ValueError)
    return False
