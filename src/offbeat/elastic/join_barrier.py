"""The barrier at which members and ranks that join meet: all are in, or none."""

import json
import time
from collections.abc import Callable, Sequence

from offbeat.elastic.newcomer import Newcomer, meet
from offbeat.liveness.heartbeats import heartbeat
from offbeat.liveness.heartbeats.status_record import JoinRequest
from offbeat.liveness.store.client import TimedStore
from offbeat.transport.links import Links

POLL = 0.1  # seconds between two looks of a member
SOON = 0.02  # the same of one that joins, for which all others wait
LATE = 1.0  # heartbeats for which members wait for one that joins
IN, OUT = "in", "out"  # whether the newcomers were let in
TOGETHER = 0.5  # seconds in which ranks that come back join by the request of the first
COMPANY = 5.0  # seconds that these wait for the request of the first, and members for all of them


def donor_of(members: Sequence[int], newcomer: int) -> int:
    """Return the member that decides about a newcomer, and shares its weight with it."""
    return next((rank for rank in members if rank > newcomer), members[0])


def donor_in(links: Links) -> int:
    """Return the donor of this rank, which joins by ``links``."""
    members = [rank for rank in links.world.ranks if rank not in links.newcomers]
    return donor_of(members, links.newcomers[0]) + links.world.local_rank


def barrier_of(store: TimedStore, name: str, request: int) -> TimedStore:
    """Return where the members called ``name`` and the newcomer of this request agree."""
    return store.under(f"{name}/join{request}")


def let_in(
    links: Links, request: JoinRequest, count: int, has_met: Callable[[], bool]
) -> Links | None:
    """Wait for all members and newcomers; return the links to them, or None if it has failed.

    Each newcomer is ``count`` ranks. ``has_met``: whether this member notices its end.

    All members call before the same exchange. It fails if a newcomer is lost, or has not been met
    and does not come: it may try again. If a member is lost, it raises :class:`PeerLost`, and the
    old links are still those of all members.
    """
    between = links.joined_by(request.ranks, request.number, count)
    barrier = barrier_of(links.store, links.name, request.number)
    is_donor = donor_of(links.world.ranks, request.rank) == links.world.rank
    until = time.monotonic() + (COMPANY if request.others else LATE * heartbeat.BEAT)
    barrier.add("members", 1)

    def are_all_here() -> bool:
        return barrier.add("members", 0) == len(links.world.ranks)

    def is_late() -> bool:
        if has_met() or time.monotonic() < until:
            return False
        return barrier.add("newcomers", 0) < len(request.ranks) and are_all_here()

    def is_hindered() -> bool:
        return links.heartbeat.has_agreed_error or is_late()

    try:
        with links.heartbeat.verb("step"), links.heartbeat.watching():
            if request.others:
                _meet(links, request, barrier, is_hindered)
            if pass_barrier(barrier, between, is_hindered):
                return between
            # Members that have not come yet would not, once the request is withdrawn.
            while is_donor and not are_all_here() and not links.heartbeat.has_agreed_error:
                time.sleep(POLL)
        links.heartbeat.look_for_agreed_error()  # another rank may have heard of it first
    except BaseException:
        between.abandon()
        raise
    between.abandon()
    if is_donor:
        links.heartbeat.ask(request, None)
    return None


def _meet(
    links: Links, request: JoinRequest, barrier: TimedStore, is_hindered: Callable[[], bool]
) -> None:
    """Wait for all newcomers, and ask their beacons: those of the others come after the request."""
    while barrier.add("newcomers", 0) < len(request.ranks) and barrier.find("outcome") is None:
        if is_hindered():
            return
        time.sleep(SOON)
    newcomers = [Newcomer(links, request, rank) for rank in request.ranks]
    meet(newcomers)
    for newcomer in newcomers:
        newcomer.close()


def come(barrier: TimedStore, between: Links, is_hopeless: Callable[[], bool]) -> bool:
    """Pass the barrier as one that joins; return whether all have come.

    Not before the step is decided: then all members watch this rank, and notice its end also in the
    first exchange with it. If it ends before, it does not come.
    """
    with between.heartbeat.attending():
        while barrier.find("step") is None:
            if is_hopeless() or between.heartbeat.has_agreed_error:
                break
            time.sleep(SOON)
    barrier.add("newcomers", 1)
    return pass_barrier(barrier, between, is_hopeless, SOON)


def pass_barrier(
    barrier: TimedStore, between: Links, is_hindered: Callable[[], bool], longest: float = POLL
) -> bool:
    """Wait until the ranks of ``between`` have come to ``barrier``; return whether all have.

    ``longest``: seconds between two looks at whether they have, at most.

    The first to know writes the outcome into the store, and all take that one: nobody goes on to
    the new group while another stays behind in the old one. Only once all have come can it be
    in: from then on all look into the new group, and a rank that is lost is lost there.
    """
    wait = 0.002
    barrier.add("come", 1)
    with between.heartbeat.attending():
        while (outcome := barrier.find("outcome")) is None:
            if is_hindered() or between.heartbeat.has_agreed_error:
                barrier.compare_set("outcome", "", OUT)
            elif barrier.add("come", 0) == between.world.size:
                barrier.compare_set("outcome", "", IN)
            else:
                time.sleep(wait)
                wait = min(2 * wait, longest)
    return outcome == IN


def companions(back: TimedStore, rank: int) -> tuple[int, ...] | None:
    """Return who has come ``back`` with ``rank``, if that is the first; None on the others."""
    back.append("ranks", f"{rank} ")
    if back.compare_set("first", "", str(rank)).decode() != str(rank):
        return None
    time.sleep(TOGETHER)
    ranks = map(int, (back.find("ranks") or "").split())  # deleted after a change meanwhile
    return tuple(other for other in dict.fromkeys(ranks) if other != rank)


def request_of_first(back: TimedStore, rank: int) -> JoinRequest | None:
    """Wait for the request of the first; return it if ``rank`` is among its companions."""
    since = time.monotonic()
    while (text := back.find("request")) is None:
        if time.monotonic() - since > COMPANY:
            return None
        time.sleep(POLL)
    request = JoinRequest.of(json.loads(text))
    return request if rank in request.others else None


def close_barrier(barrier: TimedStore) -> None:
    """Let all members know that the newcomer does not come, unless it is in."""
    barrier.compare_set("outcome", "", OUT)
