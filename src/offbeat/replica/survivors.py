"""Continuation without a lost rank: survivors agree through the store, which still works."""

import json
import time
from typing import Any, NamedTuple

from offbeat.comm.failure import PeerLost
from offbeat.comm.heartbeat import Heartbeat
from offbeat.comm.links import Links
from offbeat.comm.timed_store import TimedStore
from offbeat.replica.connection import Connection
from offbeat.replica.slots import ParameterSlot, SlotFiller

POLL = 0.2  # seconds between two looks at the store
PATIENCE = 1800.0  # seconds for which survivors wait for a rank that is running but busy


class Agreement(NamedTuple):
    """Ranks that continue, ranks that are lost, and the first step with exchanges between all."""

    living: tuple[int, ...]
    lost: tuple[int, ...]
    step: int

    def text(self, rank: int) -> str:
        """Return a line for the log of ``rank``."""
        return (
            f"rank {rank}: ranks {list(self.lost)} are lost; {list(self.living)} train on, with "
            f"exchanges from step {self.step}. See the logs of the lost ranks"
        )


class Reconnected(NamedTuple):
    """The connection of the survivors, their new parameters slot, and what they agreed on."""

    connection: Connection
    parameters: ParameterSlot[Any]
    agreements: list[Agreement]


def reconnect(
    connection: Connection, filler: SlotFiller, steps: int, loss: PeerLost
) -> Reconnected:
    """Agree with the other survivors and connect to them; all living ranks call.

    If another rank is lost meanwhile, its survivors agree once more, over the links of the new,
    smaller world: there also those meet who had connected already. Raises as
    :func:`agree_on_survivors` does.
    """
    current, agreements = connection, []
    while True:
        if current.links is None:
            raise loss
        try:
            agreements.append(agree_on_survivors(current.links, steps, loss))
        except BaseException:
            current.close()
            raise
        between = regroup(current.links, agreements[-1])
        world = current.world.among(agreements[-1].living)
        current = Connection(world, between, None)
        try:
            current = Connection.over(world, between)
            slot = filler.parameters(between, current.control)
        except PeerLost as another:
            loss = another
            continue
        # Not before: some ranks are steps behind, and catch up alone.
        current.resume(connection)
        return Reconnected(current, slot, agreements)


def agree_on_survivors(links: Links, steps: int, loss: PeerLost) -> Agreement:
    r"""Agree on the living ranks and on the largest step count; all living ranks must call.

    .. math:: k = \max_{i \in \mathrm{living}} k_i

    Each rank writes its number of ``steps`` into the store, and waits until every other rank has
    done so or is lost: at most half an hour for one that is running but busy. Ranks behind step k
    then reach it without exchanges, so that all exchange at the same steps again.

    Raises ``loss`` again where the run cannot continue: a rank has left (that is a shutdown), no
    rank is lost (a connection broke), the store is gone, or a living rank does not call. Raises
    :class:`PeerLost` about this rank itself if the others continue without it.
    """
    rank = links.world.rank
    meet = links.store.under(f"{links.name}/survivors")
    try:
        meet.set(str(rank), str(steps))
        agreed = _outcome(meet, links.heartbeat)
    except RuntimeError as gone:
        raise loss from gone
    if agreed is None:
        raise loss
    if rank not in agreed.living:
        raise PeerLost(
            f"rank {rank} was given up by the others, which read no heartbeat of it and continue "
            f"as {list(agreed.living)}; its model is valid, but it cannot rejoin them"
        )
    return agreed


def regroup(links: Links, agreed: Agreement) -> Links | None:
    """Replace ``links`` by links between the living ranks; None for a rank that is left alone."""
    between = links.among(agreed.living) if len(agreed.living) > 1 else None
    # Not before all have agreed: in the old world, it publishes that this rank has left.
    links.close()
    return between


def _outcome(meet: TimedStore, heartbeat: Heartbeat) -> Agreement | None:
    since = time.monotonic()
    while not meet.check(["agreed"]):
        proposal = _proposal(meet, heartbeat, since)
        if proposal is not None:
            # Two ranks may read different states, for instance that one is late and that it came
            # after all: the first proposal stands, and all ranks take that one.
            meet.compare_set("agreed", "", proposal)
        elif time.monotonic() - since > PATIENCE:
            return None
        else:
            time.sleep(POLL)
    agreed = json.loads(meet.get("agreed"))
    if agreed is None:
        return None
    living, lost, step = agreed
    return Agreement(tuple(living), tuple(lost), step)


def _proposal(meet: TimedStore, heartbeat: Heartbeat, since: float) -> str | None:
    """Return a proposal as JSON, null for an end of the run; None while ranks are missing."""
    gone = heartbeat.gone(since)
    # Read after the heartbeats: a rank that has called may have agreed and left by now.
    steps = {r: int(meet.get(str(r))) for r in heartbeat.ranks if meet.check([str(r)])}
    missing = set(heartbeat.ranks) - set(steps)
    if missing - set(gone):
        return None
    living = [rank for rank in steps if gone.get(rank) != "lost"]
    if len(living) == len(heartbeat.ranks) or any(gone[rank] == "left" for rank in missing):
        return json.dumps(None)
    lost = [rank for rank in heartbeat.ranks if rank not in living]
    return json.dumps(Agreement(tuple(living), tuple(lost), max(steps[rank] for rank in living)))
