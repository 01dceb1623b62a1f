"""The process groups of one replica: opened on demand, closed together."""

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import partial

from torch.distributed import PrefixStore, ProcessGroup, Store

from offbeat.comm.group import Group
from offbeat.comm.heartbeat import Heartbeat, PeerLost
from offbeat.comm.lane import Lane
from offbeat.comm.meter import Meter
from offbeat.comm.world import Axis, Opener, World

RECONNECT = 60.0  # seconds that survivors of a loss have to connect anew


@dataclass(eq=False)
class Links:
    """The process groups of one replica: opened on demand, guarded and closed together."""

    world: World
    name: str
    heartbeat: Heartbeat
    meter: Meter
    opened: list[Group] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    @classmethod
    def connect(cls, world: World) -> "Links":
        """Start a replica's heartbeat under a name that all its ranks derive alike."""
        # Ranks attach their replicas in the same order, so their counts agree.
        number = world.store.add(f"attached/{world.rank}", 1)
        store = PrefixStore(str(number), world.store)
        return cls(world, str(number), Heartbeat(store, world.rank, world.ranks), Meter())

    def among(self, living: Collection[int]) -> "Links":
        """New links between the living, whose counters go on; these are then to be closed."""
        world = self.world.among(living)
        name = f"{self.name} without {world.lost}"
        heartbeat = Heartbeat(PrefixStore(name, world.store), world.rank, world.ranks)
        heartbeat.phase = (self.heartbeat.phase[0], "")
        return Links(world, name, heartbeat, self.meter)

    def open(self, axis: Axis) -> Group | None:
        """A new group over ``axis``; None where this rank would be alone in it or has no part."""
        number = next(self.numbers)  # counted even where this rank has no part: names must agree
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
        self.opened.append(group)
        return group

    def close(self) -> None:
        """End the heartbeat, the lanes and the groups."""
        self.heartbeat.stop()
        for group in self.opened:
            if "lane" in vars(group):
                group.lane.close()
            group.process_group.shutdown()
            group.closed = True
        self.opened.clear()


def _open_in_time(opener: Opener, meet: Store, rank: int, size: int) -> ProcessGroup:
    """Open a group of survivors, who all come at once.

    If another rank dies now, the others would wait for it until the timeout of the process group,
    half an hour: so they do it in a thread, and leave it behind.
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
