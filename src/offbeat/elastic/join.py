"""A rank that joins a run: it finds one in the store, makes a request, and waits at the barrier."""

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import final

from offbeat.attach.checks import difference, fingerprint, model_fault
from offbeat.attach.connection import Connection
from offbeat.attach.slots import SlotFiller
from offbeat.attach.start import algorithm_fault, argument_fault
from offbeat.elastic.join_barrier import (
    SOON,
    barrier_of,
    close_barrier,
    come,
    companions,
    pass_barrier,
    request_of_first,
)
from offbeat.elastic.node import Node
from offbeat.exchange import Algorithm
from offbeat.kit.warning import warn
from offbeat.liveness.failure import PeerLost
from offbeat.liveness.heartbeats.diagnosis import store_lost
from offbeat.liveness.heartbeats.roll_call import WARN_AFTER
from offbeat.liveness.heartbeats.status_record import JoinRequest, StatusRecord
from offbeat.liveness.store.client import TimedStore
from offbeat.platform.process_group import TIMEOUT
from offbeat.transport.links import Links
from offbeat.transport.meter import Meter
from offbeat.transport.run.membership import Membership, read_membership
from offbeat.transport.run.run_watch import RunWatch
from offbeat.transport.world import World

POLL = 0.1  # seconds between two looks at the store
ATTEMPTS = 20  # requests until a rank gives up
MODEL = "model"  # the key of the fingerprint
PRESENT = "algorithm"  # the key of the algorithm at present


def announce(links: Links, filler: SlotFiller) -> None:
    """Let ranks join from now on; by the first rank, before any other can be past the start."""
    tell_model(links, filler)
    tell(links, PRESENT, repr(filler.algorithm))
    if links.run and links.world.rank == links.world.ranks[0]:
        links.announce()


def tell_model(links: Links, filler: SlotFiller) -> None:
    """Tell ranks that join which model and algorithm the run began with; all ranks call."""
    if links.run:
        tell(links, MODEL, json.dumps(fingerprint(filler, "")))


def tell(links: Links, key: str, value: str) -> None:
    """Tell ranks that join, by the first rank; the others know it, too.

    The store may be started again when the first one is gone.
    """
    if links.run and links.world.rank == links.world.ranks[0]:
        # Not by set(): what another one has written before does not come back over it.
        found = links.store.find(key)
        while found != value:
            found = links.store.compare_set(key, found or "", value).decode()
    elif links.run:
        links.store.remember(key, value)


@final
@dataclass(eq=False)
class JoinAttempts:
    """The attempts of a rank to join the run in the store of ``world``.

    Those of ``mates`` join together: the first of them makes the requests. So do ranks that come
    back at about one time, as of a whole site.
    """

    world: World
    filler: SlotFiller
    read: Callable[[str], Algorithm]  # an algorithm from its text
    meter: Meter = field(default_factory=Meter)
    fault: str | None = None  # why it cannot join, if it is known before
    mates: Node | None = None
    attempts: int = 0
    number: int = -1
    has_warned: bool = False
    looked: float = 0.0
    asked: str = ""  # the members whom this rank has asked together with others
    store: TimedStore = field(init=False)

    def connect(self) -> Connection | int:
        """Return the connection to a run that goes on, or the number of the run to start.

        Raises ``ValueError`` on this rank and its ``mates`` alone if it cannot join, and
        :class:`PeerLost` after many attempts.
        """
        self.store, mates = self.world.timed_store(), self.mates
        try:
            if mates is None:
                return self._lead()
            found = self._lead() if mates.is_first else self._follow(mates)
            if mates.is_first and isinstance(found, int):
                mates.tell(found)
            return found
        except (ValueError, PeerLost) as error:
            raise error if mates is None else mates.report_error(error) from None
        except RuntimeError as error:
            raise store_lost(error) from error
        finally:
            self.store.close()

    def _follow(self, mates: Node) -> Connection | int:
        """Take part in the attempts of the first of ``mates``."""
        while isinstance(told := mates.tell(None), list):
            membership, number = told
            links = self._meet(
                Membership.of(membership),
                self.world.rank,
                JoinRequest(self.world.rank, number),
                lambda barrier, links: pass_barrier(barrier, links, lambda: mates.is_lost, SOON),
            )
            if links is not None:
                return Connection(links.world, links, None, mates)
        return int(told)

    def _lead(self) -> Connection | int:
        watch, since = None, time.monotonic()
        while True:
            membership = read_membership(self.store)
            if self.world.is_new and (not membership.name or (watch and watch.is_over())):
                self._await_a_run(membership.run > 0 or watch is not None, time.monotonic() - since)
            if not membership.name and not self.world.is_new:
                return membership.run + 1
            if membership.name:
                if watch is None or watch.membership != membership:
                    watch = RunWatch(self.store, membership, self._rank(membership))
                links = self._request(membership, watch)
                if links is not None:
                    return Connection(links.world, links, None, self.mates)
                if watch.is_over() and not self.world.is_new:
                    return membership.run + 1
            time.sleep(POLL)

    def _await_a_run(self, was_one: bool, waited: float) -> None:
        """Warn a new rank that no run goes on, and end its wait at last.

        At once if it ``was_one`` that `offbeat store` has told of: that is over.
        """
        if self.world.store_returns and was_one:
            raise PeerLost(
                "the run has ended before this rank could join it; start it again to take part in "
                "the next one"
            )
        if waited > TIMEOUT.total_seconds():
            raise PeerLost(f"no run to join has begun in this store within {waited:.0f} s")
        if waited > WARN_AFTER and not self.has_warned:
            self.has_warned = True
            warn(
                f"no run to join goes on in this store after {waited:.0f} s; waiting for one to "
                "begin. Do its ranks pass elastic=True and the same store?"
            )

    def _rank(self, membership: Membership) -> int:
        if not self.world.is_new:
            return self.world.rank
        # A new rank that was in, and has tried again since, keeps the number that it got.
        return self.number if self.number in membership.lost else membership.next_rank

    def _request(self, membership: Membership, watch: RunWatch) -> Links | None:
        """Make one attempt; return the links between all ranks if it succeeds.

        Otherwise the membership has changed, or another rank joins first, or the run is over.
        """
        rank = watch.rank
        if rank in membership.ranks:
            self._await_own_loss(membership, watch)
            return None
        if None in (self.store.find(MODEL), self.store.find(PRESENT)):
            return None  # the store was started again: the others write what they know
        self._require_fitting(membership, rank)
        record = StatusRecord(self.store.under(f"{membership.name}/heartbeat"))
        status = record.read()
        if status.request is not None or status.agreed is not None or status.left is not None:
            return None
        if self.attempts == ATTEMPTS:
            raise PeerLost(
                f"rank {rank} could not join in {ATTEMPTS} attempts: each time a rank was lost "
                "meanwhile; the others go on without it"
            )
        self.number, others = rank, list[int]()
        back = self.store.under(f"{membership.name}/back")
        is_one = self.mates is None and not self.world.is_new
        if is_one and len(membership.lost) > 1 and self.asked != membership.name:
            self.asked = membership.name
            found = companions(back, rank)
            if found is None:
                return self._join_with_first(membership, watch, record, back)
            if self._growth_fault(membership, 1 + len(found)) is None:
                others += found
        request = JoinRequest(rank, self.store.add("requests", 1), tuple(others))

        def ask(barrier: TimedStore, links: Links) -> bool:
            if record.post(request=request).request != request:
                return False
            self.attempts += 1  # not where another newcomer was first: there may be many
            if others:
                back.set("request", json.dumps(request))
            if self.mates is not None:
                self.mates.tell([membership, request.number])
            hopeless = partial(self._is_hopeless, membership, watch, record, request)
            return come(barrier, links, hopeless)

        return self._meet(membership, rank, request, ask)

    def _join_with_first(
        self, membership: Membership, watch: RunWatch, record: StatusRecord, back: TimedStore
    ) -> Links | None:
        """Join by the request of the first that has come back, if it is for this rank too."""
        request = request_of_first(back, watch.rank)
        if request is None:
            return None

        hopeless = partial(self._is_hopeless, membership, watch, record, request)
        return self._meet(membership, watch.rank, request, partial(come, is_hopeless=hopeless))

    def _meet(
        self,
        membership: Membership,
        rank: int,
        request: JoinRequest,
        has_come: Callable[[TimedStore, Links], bool],
    ) -> Links | None:
        """Return the links between all for ``request``, if ``has_come`` says that all have come.

        Its number is that of the first of the mates.
        """
        own: list[tuple[int, ...]] = [(newcomer,) for newcomer in request.ranks]
        if self.mates is not None:
            own = [self.world.nodes[self.world.node]]
        newcomers = tuple(newcomer for node in own for newcomer in node)
        lost = tuple(other for other in membership.lost if other not in newcomers)
        nodes = tuple(sorted((*membership.nodes, *own)))
        world = replace(self.world, rank=rank, nodes=nodes, lost=lost, is_new=False)
        links = Links.joining(world, membership, request.number, newcomers, self.meter)
        barrier = barrier_of(self.store, membership.name, request.number)
        try:
            with contextlib.nullcontext() if self.mates is None else self.mates.attending():
                if has_come(barrier, links):
                    return links
        except BaseException:
            with contextlib.suppress(RuntimeError):
                close_barrier(barrier)
            links.abandon()
            raise
        links.abandon()
        return None

    def _is_hopeless(
        self, membership: Membership, watch: RunWatch, record: StatusRecord, request: JoinRequest
    ) -> bool:
        if time.monotonic() - self.looked < POLL:
            return False
        self.looked = time.monotonic()
        if self.mates is not None and self.mates.is_lost:
            return True
        if watch.is_over() or read_membership(self.store) != membership:
            return True
        return record.read().request != request

    def _await_own_loss(self, membership: Membership, watch: RunWatch) -> None:
        """Wait until the others have noticed that the worker which had this number is lost.

        With slow steps they then wait for this rank, since they read that it is back.
        """
        self.store.set("back", membership.name)
        while read_membership(self.store) == membership and not watch.is_over():
            if watch.is_rank_alive:
                raise ValueError(
                    f"rank {watch.rank} takes part in the run already; give every worker a number "
                    "of its own, or rank=None to a new one"
                )
            time.sleep(SOON)

    def _growth_fault(self, membership: Membership, by: int = 1) -> str | None:
        """Return why the run could not go on with ``by`` more, now or in a later phase, or None."""
        algorithm, present = self.filler.algorithm, self.store.get(PRESENT).decode()
        algorithm = algorithm if present == repr(algorithm) else self.read(present)
        size = len(membership.ranks if self.mates is None else membership.nodes) + by
        exchanges = (each.parameters for each in algorithm.phases)
        faults = (exchange.growth_fault(size) for exchange in exchanges if exchange is not None)
        return next(filter(None, faults), None)

    def _node_fault(self, membership: Membership) -> str | None:
        here, there = self.world.nodes[self.world.node], membership.nodes[0]
        if self.mates is None or (len(here) == len(there) and {*here} <= {*membership.lost}):
            return None
        return (
            f"its node {[*here]} is none of those that were lost, {[*membership.lost]} by "
            f"{len(there)}; pass World.at() the size and ranks_per_node of the start"
        )

    def _require_fitting(self, membership: Membership, rank: int) -> None:
        """Raise ``ValueError`` if this rank cannot join, which the others then do not notice."""
        if rank not in membership.lost and rank != membership.next_rank:
            raise ValueError(
                f"rank {rank} cannot join the ranks {membership.ranks}: it is none of those that "
                f"were lost, {list(membership.lost)}; give rank=None to a new worker"
            )
        fault = (
            self.fault
            or argument_fault(self.filler)
            or model_fault(self.filler.model)
            or algorithm_fault(self.filler)
            or self._growth_fault(membership)
            or self._node_fault(membership)
        )
        if fault is None:
            here = json.dumps(fingerprint(self.filler, ""))
            different = difference(json.loads(self.store.get(MODEL)), json.loads(here))
            fault = different and f"{different}; use the same versions, model and algorithm"
        if fault is not None:
            raise ValueError(f"rank {rank} cannot join the ranks {membership.ranks}: {fault}")
