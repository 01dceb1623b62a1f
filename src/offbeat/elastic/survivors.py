"""Continuation without a lost rank: survivors agree through the store, which still works."""

import contextlib
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from offbeat.attach.connection import Connection
from offbeat.attach.slots import SlotFiller
from offbeat.elastic.agreement import Agreement, Progress, Stage
from offbeat.elastic.handover import Healed, heal
from offbeat.exchange import BoundGradients, BoundParameters
from offbeat.liveness.failure import PeerLost
from offbeat.liveness.heartbeats.heartbeat import Heartbeat
from offbeat.liveness.store.client import TimedStore
from offbeat.transport.links import Links

POLL = 0.01, 0.5  # seconds between two looks at the store, at first and at last in large worlds
LOOKS = 1000  # of all ranks in a second
PATIENCE = 1800.0  # seconds for which survivors wait for a rank that is running but busy


class Reconnected(NamedTuple):
    """The connection of the survivors, their new slots, and what they agreed on.

    The slot of gradients is None where these are not exchanged by those who may be lost. ``healed``
    is what a rank behind has got.
    """

    connection: Connection
    parameters: BoundParameters
    gradients: BoundGradients | None
    agreements: list[Agreement]
    healed: Healed | None = None


def reconnect(
    connection: Connection,
    filler: SlotFiller,
    progress: Progress,
    loss: PeerLost,
    made: Callable[[Agreement], Healed],
    following: SlotFiller | None = None,
) -> Reconnected:
    """Agree with the other survivors and connect to them; all living ranks call.

    ``progress``: how far this rank has come. ``made`` returns what it hands over to those behind.
    ``following`` fills the slots instead of ``filler`` if one of the living has committed more than
    this rank: a switch to it.

    If another rank is lost meanwhile, its survivors agree once more, over the links of the new,
    smaller world: there also those meet who had connected already. Raises as
    :func:`agree_on_survivors` does.
    """
    between, agreed = _without(connection, progress, loss)
    if following is not None and agreed.commits > progress.commits:
        filler = following
    return connect_over(between, connection, filler, progress, [agreed], made)


def connect_over(
    current: Connection,
    earlier: Connection,
    filler: SlotFiller,
    progress: Progress,
    agreements: list[Agreement],
    made: Callable[[Agreement], Healed],
    pair: Collection[int] = (),
) -> Reconnected:
    """Open the groups of ``current``, which has links only; all its ranks call.

    As :func:`reconnect` if a rank is lost meanwhile. Continues the count of calls of ``earlier``.
    ``pair``: as in :meth:`Connection.open`.
    """
    while True:
        if agreements and (last := agreements[-1]).behind:
            pair = last.donor, *last.behind
        try:
            with current.alike():
                with earlier.meter.timing("connecting"):
                    if current.links is not None:
                        current.links.announce()  # at once: who joins must not look at the old ones
                    current = current.open(pair)
                    slots = current.links, current.control
                    parameters = filler.parameters(*slots)
                    gradients = filler.gradients(*slots) if filler.exchanges_again else None
                with earlier.meter.timing("healing"):
                    healed = heal(made, current.control, agreements[-1]) if agreements else None
        except PeerLost as loss:
            current, agreed = _without(current, progress, loss)
            agreements.append(agreed)
            pair = ()
            continue
        # Not before: some ranks are steps behind, and catch up alone.
        if earlier.links is not None:
            current.resume(earlier.links.heartbeat.phase)
        return Reconnected(current, parameters, gradients, agreements, healed)


def _without(
    connection: Connection, progress: Progress, loss: PeerLost
) -> tuple[Connection, Agreement]:
    if connection.links is None:
        raise loss
    if connection.mates is not None and connection.mates.is_lost:
        resign(connection.links)  # the others must not wait for what is left of this node
        raise loss
    try:
        with connection.meter.timing("agreement"):
            agreed = agree_on_survivors(connection.links, progress, loss, connection.units)
    except BaseException:
        connection.close()
        raise
    between, world = regroup(connection.links, agreed), connection.world.among(agreed.living)
    return replace(connection, world=world, links=between, control=None), agreed


def resign(links: Links) -> None:
    """Leave as one that is lost: a rank that has no model yet cannot continue with the others."""
    with contextlib.suppress(RuntimeError):
        _say(links.store.under(f"{links.name}/survivors"), links.world.rank, "lost")
    links.abandon()


def agree_on_survivors(
    links: Links, progress: Progress, loss: PeerLost, units: Sequence[Sequence[int]] = ()
) -> Agreement:
    r"""Agree on the living ranks and on the largest step count; all living ranks must call.

    .. math:: k = \max_{i \in \mathrm{living}} k_i

    Each rank writes how far it has come into the store, and waits until every other
    rank has done so or is lost: at most half an hour for one that is running but busy. It reads the
    heartbeats of the missing ranks between itself and the next one that has called, and writes
    which of them are lost. Ranks behind step k then reach it without exchanges, so that all
    exchange at the same steps again. The ranks of each of ``units``, by default one, are lost
    together: none is waited for, since it may wait for the lost one outside of offbeat.

    Raises ``loss`` again where the run cannot continue: a rank has left (that is a shutdown), no
    rank is lost (a connection broke), the store is gone, or a living rank does not call. Raises
    :class:`PeerLost` about this rank itself if the others continue without it.
    """
    rank = links.world.rank
    meet = links.store.under(f"{links.name}/survivors")
    try:
        _say(meet, rank, "/".join(map(str, progress)))
        agreed = _outcome(meet, links.heartbeat, units or [(r,) for r in links.world.ranks])
    except RuntimeError as gone:
        raise loss from gone
    if agreed is None:
        raise loss
    if rank not in agreed.living:
        again = "start it again to rejoin them" if links.run else "it cannot rejoin them"
        raise PeerLost(
            f"rank {rank} was given up by the others, which read no heartbeat of it, or had a "
            f"result that it misses, and continue as {list(agreed.living)}; its model is valid; "
            f"{again}"
        )
    return agreed


def regroup(links: Links, agreed: Agreement) -> Links | None:
    """Replace ``links`` by links between the living ranks.

    None for a rank that is left alone, unless others may join it.
    """
    goes_on = len(agreed.living) > 1 or links.run
    between = links.among(agreed.living) if goes_on else None
    # Not before all have agreed: in the old world, it publishes that this rank has left.
    links.close()
    return between


def _outcome(
    meet: TimedStore, heartbeat: Heartbeat, units: Sequence[Sequence[int]]
) -> Agreement | None:
    since, heard, words, pause = time.monotonic(), 0, dict[int, str](), POLL[0]
    longest = min(max(5 * POLL[0], len(heartbeat.ranks) / LOOKS), POLL[1])
    while time.monotonic() - since < PATIENCE:
        # One small call as long as there is nothing new.
        if (count := meet.add("count", 0)) > heard:
            heard, words = count, _words(meet)
            proposal = _proposal(words, units)
            if proposal is not None:
                # Two ranks may read different words, for instance that one is late and that it
                # came after all: the first proposal stands, and all ranks take that one.
                agreed = json.loads(meet.compare_set("agreed", "", proposal))
                if agreed is None:
                    return None
                fields: list[Any] = [tuple(x) if isinstance(x, list) else x for x in agreed]
                return Agreement(*fields)
        for rank, how in heartbeat.gone(_suspects(heartbeat, words)).items():
            if words.get(rank) != how:
                _say(meet, rank, how)
        time.sleep(pause)
        pause = min(1.5 * pause, longest)
    return None


def _say(meet: TimedStore, rank: int, word: str) -> None:
    """Write how far ``rank`` has come, or that it is "lost" or has "left"."""
    meet.append("words", f"{rank}={word} ")
    meet.add("count", 1)


def _words(meet: TimedStore) -> dict[int, str]:
    """Return the last word on each rank."""
    pairs = (word.split("=") for word in meet.get("words").decode().split())
    return {int(rank): word for rank, word in pairs}


def _suspects(heartbeat: Heartbeat, words: Mapping[int, str]) -> list[int]:
    """Return the ranks after this one up to the next that has called, without those known gone.

    Every missing rank is thus read by one rank, also where half of the world is lost.
    """
    found, start = [], heartbeat.ranks.index(heartbeat.rank) + 1
    for rank in (*heartbeat.ranks[start:], *heartbeat.ranks[: start - 1]):
        if words.get(rank) not in ("left", "lost"):
            found.append(rank)
        if words.get(rank) not in (None, "left", "lost"):
            break
    return found


def _proposal(words: Mapping[int, str], units: Sequence[Sequence[int]]) -> str | None:
    """Return a proposal as JSON, null for an end of the run; None while ranks are missing."""
    whole = [unit for unit in units if all(words.get(r) not in ("left", "lost") for r in unit)]
    ranks = sorted(rank for unit in whole for rank in unit)
    if any(rank not in words for rank in ranks):
        return None
    living = {rank: Progress(*map(int, words[rank].split("/"))) for rank in ranks}
    if len(whole) == len(units) or "left" in words.values():
        return json.dumps(None)
    steps, commits, *_ = (max(numbers) for numbers in zip(*living.values(), strict=True))
    behind = [r for r, each in living.items() if max(each.commits, each.holds) < commits]
    ahead = [rank for rank in living if rank not in behind and living[rank].commits == commits]
    # Equal on all of these, but not after gossip: some have not heard of the last steps of others.
    used = min(living[rank].used for rank in ahead)
    farthest = max(ahead, key=lambda rank: living[rank].reached)
    # Gradients that were in the hands of the script are no longer what all had agreed on.
    for rank in [rank for rank in behind if living[rank].reached >= living[farthest].reached]:
        del living[rank]
        behind.remove(rank)
    donor = farthest if behind else -1
    has_gradients = bool(behind) and living[farthest].stage == Stage.HAS_GRADIENTS
    lost = sorted(rank for unit in units for rank in unit if rank not in living)
    agreed = tuple(living), tuple(lost), steps, commits, used
    return json.dumps(Agreement(*agreed, tuple(behind), donor, has_gradients))
