"""Going on without a lost rank: survivors agree through the store, all that still works."""

import json
import time
from typing import NamedTuple

from torch.distributed import PrefixStore, Store

from offbeat.comm.heartbeat import Heartbeat, PeerLost
from offbeat.comm.links import Links

LOOK = 0.2  # seconds between two looks at the store
PATIENCE = 1800.0  # seconds for which a rank that lives and does not come is waited for


class Agreement(NamedTuple):
    """Who goes on and who is lost, and the first step at which all exchange again."""

    living: tuple[int, ...]
    lost: tuple[int, ...]
    step: int

    def text(self, rank: int) -> str:
        """For the log of ``rank``."""
        return (
            f"rank {rank}: ranks {list(self.lost)} are lost; {list(self.living)} train on, with "
            f"exchanges from step {self.step}. The logs of the lost may say why"
        )


def agree_on_survivors(links: Links, steps: int, loss: PeerLost) -> Agreement:
    r"""Who lives, and how far the furthest of them is; all ranks that live must call.

    .. math:: k = \max_{i \in \mathrm{living}} k_i

    Everyone writes its number of ``steps`` into the store, and waits until every other rank has
    done so or is lost: at most half an hour for one that lives but is busy. Those behind step k
    then reach it without exchanges, so that all exchanges fall on the same steps again.

    Raises ``loss`` again where going on is no cure: a rank has left (that is a shutdown), nobody
    is lost (a connection broke), the store is gone, or somebody does not come. Raises
    :class:`PeerLost` about this rank itself if the others have given it up.
    """
    rank = links.world.rank
    meet = PrefixStore(f"survivors of {links.name}", links.world.store)
    try:
        meet.set(str(rank), str(steps))
        agreed = _outcome(meet, links.heartbeat)
    except RuntimeError as gone:
        raise loss from gone
    if agreed is None:
        raise loss
    if rank not in agreed.living:
        raise PeerLost(
            f"rank {rank} was given up by the others, who heard nothing of it for too long, and "
            f"train on as {list(agreed.living)}; nothing is wrong with its model, but it is alone"
        )
    return agreed


def regroup(links: Links, agreed: Agreement) -> Links | None:
    """Links between the living, in place of ``links``; None for one that is left alone."""
    between = links.among(agreed.living) if len(agreed.living) > 1 else None
    # Not before all have agreed: in the old world, this says that we have left.
    links.close()
    return between


def _outcome(meet: Store, heartbeat: Heartbeat) -> Agreement | None:
    since = time.monotonic()
    while not meet.check(["agreed"]):
        proposal = _proposal(meet, heartbeat, since)
        if proposal is not None:
            # Two ranks may see different things, for instance that one is late and that it came
            # after all: the first proposal stands, and everybody takes that one.
            meet.compare_set("agreed", "", proposal)
        elif time.monotonic() - since > PATIENCE:
            return None
        else:
            time.sleep(LOOK)
    agreed = json.loads(meet.get("agreed"))
    if agreed is None:
        return None
    living, lost, step = agreed
    return Agreement(tuple(living), tuple(lost), step)


def _proposal(meet: Store, heartbeat: Heartbeat, since: float) -> str | None:
    """What to agree on, as JSON: null for an end of the run. None as long as that is not clear."""
    gone = heartbeat.gone(since)
    # Read after the heartbeats: whoever has come may have agreed by now, and have left this world.
    steps = {r: int(meet.get(str(r))) for r in heartbeat.ranks if meet.check([str(r)])}
    missing = set(heartbeat.ranks) - set(steps)
    if missing - set(gone):
        return None
    living = [rank for rank in steps if gone.get(rank) != "lost"]
    if len(living) == len(heartbeat.ranks) or any(gone[rank] == "left" for rank in missing):
        return json.dumps(None)
    lost = [rank for rank in heartbeat.ranks if rank not in living]
    return json.dumps(Agreement(tuple(living), tuple(lost), max(steps[rank] for rank in living)))
