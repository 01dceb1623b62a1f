"""The admission of a rank that joins: members agree on a step through the store, and let it in."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from offbeat.exchange import ElasticExchange
from offbeat.liveness import heartbeat
from offbeat.liveness.status_record import JoinRequest
from offbeat.liveness.store import TimedStore
from offbeat.transport.links import Links
from offbeat.transport.membership import name_after
from offbeat.transport.world import World

POLL = 0.1  # seconds between two looks at whether all have come, at most
IN, OUT = "in", "out"  # whether the newcomer was let in


def donor_of(members: Sequence[int], newcomer: int) -> int:
    """Return the member that decides about a newcomer, and gives it half of its weight."""
    return next((rank for rank in members if rank > newcomer), members[0])


def donor_in(world: World) -> int:
    """Return the donor of this rank, which joins the others of ``world``."""
    return donor_of([rank for rank in world.ranks if rank != world.rank], world.rank)


def barrier_of(store: TimedStore, name: str, request: int) -> TimedStore:
    """Return where the members called ``name`` and the newcomer of this request agree."""
    return store.under(f"{name}/join{request}")


@final
@dataclass(eq=False)
class JoinBarrier:
    """What one member knows about the present request to join.

    Nobody waits until the step at which all members let the newcomer in:

    1. The newcomer writes its request into the status record, which all read at each heartbeat.
    2. Each member acknowledges it, and from then on looks for the decision before every exchange.
    3. Once all have acknowledged, the donor writes step k of the admission, before an exchange.

    The exchanges of gossip carry the word on: k is a step that nobody begins before it has heard,
    over any number of ranks, from the donor (:meth:`ElasticExchange.reaches_all`). Whoever
    begins step k has acknowledged before the decision was written, and was reached by it before,
    so that its look finds it. The write must be answered before the exchange is launched: a
    message could overtake it otherwise.
    """

    request: JoinRequest | None = None
    step: int | None = None
    is_refused: bool = False
    _beat: bytes = b""
    _beats: int = 0
    _since: float = 0.0

    def due(
        self, links: Links, exchange: ElasticExchange, steps: int, first: int
    ) -> JoinRequest | None:
        """Return the request to fulfil before the exchange of step number ``steps``, or None.

        ``first``: the first step with exchanges between all members.
        """
        request = links.heartbeat.request
        with links.heartbeat.explaining():
            if request != self.request:
                self._take_up(request, links)
            if request is None or self.is_refused:
                return None
            if self.step is None:
                self.step = self._decision(request, links, exchange, steps, first)
        return request if self.step is not None and steps >= self.step else None

    def _take_up(self, request: JoinRequest | None, links: Links) -> None:
        self.request, self.step, self.is_refused = request, None, False
        self._beat, self._beats = b"", 0
        if request is not None:
            barrier_of(links.store, links.name, request.number).add("acknowledged", 1)

    def _decision(
        self, request: JoinRequest, links: Links, exchange: ElasticExchange, steps: int, first: int
    ) -> int | None:
        barrier, ranks = barrier_of(links.store, links.name, request.number), links.world.ranks
        donor = donor_of(ranks, request.rank)
        if links.world.rank != donor:
            decision = barrier.find("step")
            return None if decision is None else int(decision)
        if not self._lives(request, links) or barrier.add("acknowledged", 0) < len(ranks):
            return None
        sender, begin = ranks.index(donor), max(steps, first)
        step = max(steps + 1, exchange.reaches_all(len(ranks), sender, begin))
        # Not set(): the store does not answer it.
        return int(barrier.compare_set("step", "", str(step)))

    def _lives(self, request: JoinRequest, links: Links) -> bool:
        """Return whether the newcomer is certain to live; withdraw its request if it is silent."""
        name = name_after(links.name, links.change, request.number)
        beat = links.store.under(f"{name}/heartbeat").get(f"rank{request.rank}")
        now = time.monotonic()
        if beat != self._beat:
            self._beat, self._since, self._beats = beat, now, self._beats + 1
        elif now - self._since > heartbeat.SILENT_AFTER:
            links.heartbeat.withdraw(request)
        return self._beats > 1


def let_in(links: Links, request: JoinRequest) -> Links | None:
    """Wait for all members and the newcomer; return the links to them, or None if it has failed.

    All members call before the same exchange. It fails if the newcomer is lost; if a member is
    lost, it raises :class:`PeerLost`, and the old links are still those of all members.
    """
    between = links.joined_by(request.rank, request.number)
    barrier = barrier_of(links.store, links.name, request.number)
    try:
        with links.heartbeat.verb("step"), links.heartbeat.watching():
            if pass_barrier(barrier, between, lambda: links.heartbeat.has_agreed_error):
                return between
        links.heartbeat.raise_agreed_error()
    except BaseException:
        between.abandon()
        raise
    between.abandon()
    if donor_of(links.world.ranks, request.rank) == links.world.rank:
        links.heartbeat.withdraw(request)
    return None


def pass_barrier(barrier: TimedStore, between: Links, is_hindered: Callable[[], bool]) -> bool:
    """Wait until the ranks of ``between`` have come to ``barrier``; return whether all have.

    The first to know writes the outcome into the store, and all take that one: nobody goes on to
    the new group while another stays behind in the old one. Only once all have come can it be
    in: from then on all look into the new group, and a rank that is lost is lost there.
    """
    wait = 0.002
    barrier.add("come", 1)
    with between.heartbeat.attending():
        while (outcome := barrier.find("outcome")) is None:
            if barrier.add("come", 0) == between.world.size:
                barrier.compare_set("outcome", "", IN)
            elif is_hindered() or between.heartbeat.has_agreed_error:
                barrier.compare_set("outcome", "", OUT)
            else:
                time.sleep(wait)
                wait = min(2 * wait, POLL)
    return outcome == IN


def close_barrier(barrier: TimedStore) -> None:
    """Let all members know that the newcomer does not come, unless it is in."""
    barrier.compare_set("outcome", "", OUT)
