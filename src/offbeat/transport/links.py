"""The process groups of one replica: opened on demand, closed together."""

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Event

from torch.distributed import PrefixStore, ProcessGroup

from offbeat.liveness.failure import PeerLost
from offbeat.liveness.heartbeats.beacon import Place
from offbeat.liveness.heartbeats.diagnosis import store_lost
from offbeat.liveness.heartbeats.heartbeat import Heartbeat
from offbeat.liveness.heartbeats.roll_call import hear, roll_call
from offbeat.liveness.lane import Lane
from offbeat.liveness.store.client import TimedStore
from offbeat.platform.peers import lazy_peers
from offbeat.platform.process_group import (
    client_sockets,
    connect_to,
    end_waits,
    hang_up,
)
from offbeat.transport.group import Group, close_at_exit, close_sockets
from offbeat.transport.meter import Meter
from offbeat.transport.run.membership import ENDED, Membership, name_after, write_membership
from offbeat.transport.world import Axis, World

CONNECTIONS, MOST = "OFFBEAT_CONNECTIONS", 64
MOMENT = 0.2  # seconds for which a rank that leaves waits for the others
POLL = 1.0  # seconds between two later looks at whether they are through, at most
LET_GO = 0.25  # seconds for the end of a thread that connects, after a loss
RECONNECT = 30.0  # seconds in which the ranks must connect after a loss or a join


def connections(given: int | None) -> int:
    """Return how many two ranks of different nodes have: ``given``, or as OFFBEAT_CONNECTIONS says.

    Raises ``ValueError`` for what is no such number.
    """
    name, text = "connections", str(given)
    if given is None:
        name, text = CONNECTIONS, os.environ.get(CONNECTIONS, "1")
    if not text.isdecimal() or not 1 <= int(text) <= MOST:
        raise ValueError(
            f"{name} is {text!r}, expected a number of connections from 1 to {MOST}, for example 8 "
            "between sites that are 100 ms apart"
        )
    return int(text)


@dataclass(eq=False)
class Links:
    """Process groups of one replica, with one heartbeat and one set of counters.

    Attributes:
        world: the layout of ranks on nodes.
        name: prefix of all keys of this replica in the store; equal on all ranks.
        store: the store, for calls that must not block.
        heartbeat: failure detector of all groups.
        meter: counters of all groups.
        opened: the groups that are open.
        numbers: numbers for the names of groups.
        process: the process that has opened them.
        run: the number of the run in its store; 0 if no rank may join it.
        change: how often its ranks have changed.
        newcomers: the ranks that join by these links.
        is_closed: whether this rank has closed them.
    """

    world: World
    name: str
    store: TimedStore
    heartbeat: Heartbeat
    meter: Meter
    run: int = 0
    change: int = 0
    newcomers: tuple[int, ...] = ()
    opened: list[Group] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    process: int = field(default_factory=os.getpid)
    is_closed: bool = False

    @classmethod
    def connect(cls, world: World, run: int = 0, meter: Meter | None = None) -> "Links":
        """Start the heartbeat of a replica, under a name that all its ranks derive alike."""
        # Ranks attach their replicas in the same order, so their counts agree.
        name = f"run{run}" if run else f"attached/{world.rank}"
        return cls._named(name, world, meter or Meter(), run, is_counted=not run)

    @classmethod
    def inside(cls, world: World, place: str, meter: Meter) -> "Links":
        """Return links between the ranks of this node; ``place``: what its ranks alone share."""
        own = world.among(world.nodes[world.node])
        return cls._named(f"node {world.node} of {place}", own, meter, change=1)

    def between_nodes(self) -> "Links":
        """Return links between the first ranks of all nodes, with the same counters."""
        world = self.world.between_nodes()
        return self._named(f"nodes of {self.name}", world, self.meter, self.run)

    def among(self, living: Collection[int]) -> "Links":
        """Return links between the ranks ``living``, with the same counters; then close these."""
        world, name = self.world.among(living), name_after(self.name, self.change)
        places = self.heartbeat.places  # of whoever ends before its heartbeat among the living
        return self._named(name, world, self.meter, self.run, self.change + 1, places=places)

    def joined_by(self, ranks: Sequence[int], request: int, count: int) -> "Links":
        """Return links between these ranks and ``count`` from each of ``ranks`` on, by a request.

        ``request``: its number.
        """
        own, world = Membership(self.run, self.change, self.name), self.world
        for rank in ranks:
            world = world.joined_by(rank, count)
        newcomers = tuple(rank + i for rank in ranks for i in range(count))
        return self.joining(world, own, request, newcomers, self.meter)

    @classmethod
    def joining(
        cls, world: World, membership: Membership, request: int, newcomers: tuple[int, ...],
        meter: Meter,
    ) -> "Links":  # fmt: skip
        """Return the links of a rank that joins: the same as :meth:`joined_by` on the others."""
        name = name_after(membership.name, membership.change, request)
        links = cls._named(name, world, meter, membership.run, membership.change + 1)
        links.newcomers = newcomers
        return links

    @classmethod
    def _named(
        cls,
        name: str,
        world: World,
        meter: Meter,
        run: int = 0,
        change: int = 0,
        is_counted: bool = False,
        places: Mapping[int, Place] | None = None,
    ) -> "Links":
        """Start the heartbeat under ``name``, or the value of a counter of this name."""
        store = world.timed_store()
        try:
            name = str(store.add(name, 1)) if is_counted else name
            heartbeat = Heartbeat(store.under(name), world.rank, world.ranks, name, places)
        except RuntimeError as error:
            raise store_lost(error) from error
        return cls(world, name, store, heartbeat, meter, run, change)

    def announce(self) -> None:
        """Tell who takes part, for ranks that request to join; each rank calls after a change."""
        if self.run:
            nodes, lost = self.world.nodes, self.world.lost
            with self.heartbeat.explaining():
                write_membership(
                    self.store, Membership(self.run, self.change, self.name, nodes, lost)
                )

    def end_run(self) -> None:
        """Let nobody join any more, since this rank is about to leave."""
        if self.run and not self.is_closed and not self.is_inherited:
            with contextlib.suppress(RuntimeError):  # without a store nobody can
                write_membership(self.store, Membership(self.run, ENDED))

    def roll_call(self, word: str, conclude: Callable[[list[str]], str]) -> str:
        """Wait until all ranks have called; return what the first concludes from their words."""
        store = self.store.under(f"{self.name}/roll call")
        return roll_call(word, conclude, self.heartbeat, store, self.world.group)

    def tell(self, key: str, text: str) -> None:
        """Tell all ranks ``text``, once for each ``key``."""
        self.store.under(f"{self.name}/told").set(key, text)

    def hear(self, key: str) -> str:
        """Wait for what a rank tells under ``key``."""
        return hear(key, self.heartbeat, self.store.under(f"{self.name}/told"))

    def open(self, axis: Axis, peers: Collection[int] | None = None) -> Group | None:
        """Open a new group over ``axis``; all ranks must call.

        ``peers``: the members with which this one exchanges messages beside collectives, by their
        number in the group; None for all. Others are not connected, for whose number a large world
        has neither the sockets nor the time. Two members must name each other.

        Returns None on a rank that would be alone in the group, or that is not a member.
        """
        number = next(self.numbers)  # counted on non-members too: names must agree
        members = self.world.members(axis, self.world.local_rank)
        if len(members) < 2:
            return None
        assert self.world.opener is not None, "a layout without an opener cannot connect"
        place, size = members.index(self.world.rank), len(members)
        width = 1 if axis == "local" else self.world.connections
        connected = None if peers is None else sorted({*lazy_peers(place, size, width), *peers})
        # A connection more per rank costs a large world seconds; after a loss it is one for each
        # opening, since one that was abandoned leaves a client of no use.
        with self.heartbeat.explaining():
            client, sockets = (
                self.store.another_client()
                if self.change or self.world.store_returns
                else (self.world.store, client_sockets(self.world.store))
            )
        meet = PrefixStore(f"{self.world.prefix}/{self.name}/{axis}{number}/{members}", client)
        is_lazy = connected is not None
        opener = partial(self.world.opener, meet, place, size, is_lazy=is_lazy, connections=width)
        process_group = self._open_watched(opener, connected or (), partial(hang_up, sockets))
        self.heartbeat.guard(process_group, connected)
        group = Group(process_group, members, axis, self.heartbeat, self.meter, connected)
        close_at_exit(group)
        self.opened.append(group)
        return group

    def drop(self, groups: Collection[Group]) -> None:
        """Close some of the groups; all ranks have read all that was sent in these.

        In a thread: the end of a group takes up to seconds, which training does not wait for.
        """
        if self.is_closed or not groups:
            return
        for group in groups:
            group.close_lane()
            group.closed = True
            self.opened.remove(group)
        lane = Lane("offbeat-close", wake=lambda: None)
        closing = lane.submit(partial(close_sockets, groups, is_over=True))
        closing.add_done_callback(lambda _: lane.close())

    @property
    def is_inherited(self) -> bool:
        """Whether this process is a forked child of the one that has opened the groups."""
        return os.getpid() != self.process

    def close(self, at_once: bool = False) -> None:
        """Stop the heartbeat and end all groups and their threads; nothing in a forked child.

        Sockets are closed when all ranks have called, or ``at_once``: no rank needs them any more.
        """
        if self.is_inherited or self.is_closed:
            return
        self._end_groups(has_left=True)
        # After an agreed error every wait raises it, and a rank that is lost never comes here.
        at_once = at_once or self.heartbeat.has_agreed_error
        lane = Lane("offbeat-leave", wake=lambda: None)
        leaving = lane.submit(self._leave, lane.closing, at_once)
        leaving.add_done_callback(lambda _: lane.close())
        with contextlib.suppress(TimeoutError):
            leaving.result(MOMENT)

    def abandon(self) -> None:
        """End as if this process had: the others find that it is lost, and go on without it."""
        self._end_groups(has_left=False)
        self._close_sockets()
        self.store.close()

    def _end_groups(self, has_left: bool) -> None:
        self.is_closed = True
        self.heartbeat.stop(has_left)
        for group in self.opened:
            group.close_lane()
            group.closed = True

    def _leave(self, is_ending: Event, at_once: bool) -> None:
        """Close the sockets, and delete the keys in the store, once no rank needs them.

        A closed socket discards what its peer has not read yet, so all ranks must be through.
        """
        wait, count = 0.001, len(self.world.ranks)
        leaving = self.store.under(f"{self.name}/leaving")
        try:
            # Those that have left before must not wait for a rank that never comes here.
            through = leaving.add("through", count if at_once else 1)
            while through < count:
                if is_ending.wait(wait):
                    return
                wait, through = min(2 * wait, POLL), leaving.add("through", 0)
            self._close_sockets(is_over=not at_once)
            if leaving.add("closed", 1) == count:
                self.store.under(self.name).clear()
        except RuntimeError:  # the store is lost, and no rank can go on
            self._close_sockets()
        finally:
            self.store.close()

    def _close_sockets(self, *, is_over: bool = False) -> None:
        close_sockets(self.opened, is_over=is_over)
        self.opened.clear()

    def _open_watched(
        self, opener: Callable[[], ProcessGroup], peers: Collection[int], wake: Callable[[], None]
    ) -> ProcessGroup:
        """Open a group and connect to ``peers`` in a thread, which ``wake`` ends if a rank is lost.

        The others would wait for that rank until the timeout of the process group, half an hour.
        """
        opened: list[ProcessGroup] = []

        def connect() -> None:
            group = opener()
            try:
                connect_to(group, peers)
            except RuntimeError:
                # The end of a group waits for ever while a socket has something to read, and the
                # error keeps this one until the garbage collector ends it, in any thread.
                end_waits(group, peers)
                raise
            opened.append(group)

        lane, started = Lane("offbeat-open", wake), time.monotonic()
        try:
            with self.heartbeat.watching():
                opening = lane.submit(connect)
                while not opening.done():
                    self.heartbeat.raise_agreed_error()
                    if self.change:
                        self._require_connecting(started)
                    with contextlib.suppress(TimeoutError):
                        opening.result(0.1)
                opening.result()
        finally:
            # Gloo waits where it is to be connected to, and nothing ends that if the peer is lost.
            lane.close(LET_GO)
        return opened[0]

    def _require_connecting(self, since: float) -> None:
        """Report a rank that was lost after a loss or a join, and before the others connected.

        Nobody watches one that has no heartbeat yet. At the attach it may start much later than
        the others; here all have been in one call just now.
        """
        if absent := self.heartbeat.absent(since):
            raise self.heartbeat.report_error(
                PeerLost(
                    f"rank {absent[0]} is lost: it has not come to connect with the others after a "
                    "loss or a join. Look at the end of its log, then start again from the last "
                    "checkpoint"
                )
            )
        if time.monotonic() - since > RECONNECT:
            raise self.heartbeat.report_error(
                PeerLost(
                    f"after a loss or a join the ranks could not connect within {RECONNECT:.0f} s: "
                    "another rank was lost meanwhile; start again from the last checkpoint"
                )
            )
