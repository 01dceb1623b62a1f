"""The process groups of one replica: opened on demand, closed together."""

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import partial

from torch.distributed import PrefixStore, ProcessGroup, Store

from offbeat.comm.failure import PeerLost
from offbeat.comm.group import Group, close_at_exit
from offbeat.comm.heartbeat import Heartbeat
from offbeat.comm.lane import Lane
from offbeat.comm.meter import Meter
from offbeat.comm.timed_store import TimedStore
from offbeat.comm.world import Axis, Opener, World

RECONNECT = 60.0  # seconds in which the survivors of a loss must connect


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
    """

    world: World
    name: str
    store: TimedStore
    heartbeat: Heartbeat
    meter: Meter
    opened: list[Group] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    @classmethod
    def connect(cls, world: World) -> "Links":
        """Start the heartbeat of a replica, under a name that all its ranks derive alike."""
        store = TimedStore(world.store)
        # Ranks attach their replicas in the same order, so their counts agree.
        name = str(store.add(f"attached/{world.rank}", 1))
        heartbeat = Heartbeat(store.under(name), world.rank, world.ranks)
        return cls(world, name, store, heartbeat, Meter())

    def among(self, living: Collection[int]) -> "Links":
        """Return links between the ranks ``living``, with the same counters; then close these."""
        world = self.world.among(living)
        name = f"{self.name} without {world.lost}"
        store = TimedStore(world.store)
        heartbeat = Heartbeat(store.under(name), world.rank, world.ranks)
        return Links(world, name, store, heartbeat, self.meter)

    def open(self, axis: Axis) -> Group | None:
        """Open a new group over ``axis``; all ranks must call.

        Returns None on a rank that would be alone in the group, or that is not a member.
        """
        number = next(self.numbers)  # counted on non-members too: names must agree
        members = self.world.members(axis, self.world.local_rank)
        if len(members) < 2:
            return None
        assert self.world.opener is not None, "a layout without an opener cannot connect"
        meet = PrefixStore(f"{self.name}/{axis}{number}/{members}", self.world.store)
        place = members.index(self.world.rank)
        opener = partial(_open_in_time, self.world.opener) if self.world.lost else self.world.opener
        process_group = opener(meet, place, len(members))
        self.heartbeat.guard(process_group)
        group = Group(process_group, members, axis, self.heartbeat, self.meter)
        close_at_exit(group)
        self.opened.append(group)
        return group

    def close(self) -> None:
        """Stop the heartbeat and end all groups and their threads."""
        self.heartbeat.stop()
        for group in self.opened:
            group.close_lane()
            group.process_group.shutdown()
            group.closed = True
        self.opened.clear()


def _open_in_time(opener: Opener, meet: Store, rank: int, size: int) -> ProcessGroup:
    """Open a group of survivors, which all call at the same time.

    If another rank is lost now, the others wait for it until the timeout of the process group, half
    an hour: so they wait in a thread, and abandon it after ``RECONNECT`` seconds.
    """
    opened: list[ProcessGroup] = []
    lane = Lane("offbeat-reconnect", wake=lambda: None)
    try:
        lane.submit(lambda: opened.append(opener(meet, rank, size))).result(RECONNECT)
    except (TimeoutError, RuntimeError) as error:
        raise PeerLost(
            f"the survivors of a loss could not connect within {RECONNECT:.0f} s: another rank was "
            f"lost meanwhile ({error}); start again from the last checkpoint"
        ) from error
    finally:
        lane.close()
    return opened[0]
