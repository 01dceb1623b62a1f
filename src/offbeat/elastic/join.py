"""The way of a rank into a run: it finds one in the store, makes a wish, and waits at the gate."""

import contextlib
import json
import time
import warnings
from dataclasses import dataclass, field, replace
from typing import Any, final

from offbeat.attach.checks import difference, fingerprint, model_fault
from offbeat.attach.connection import Connection
from offbeat.attach.start import argument_fault, join_fault
from offbeat.elastic.join_barrier import close_gate, gate_of, pass_gate
from offbeat.exchange import Algorithm, Exchanged
from offbeat.liveness import heartbeat
from offbeat.liveness.diagnosis import store_lost
from offbeat.liveness.failure import PeerLost
from offbeat.liveness.roll_call import WARN_AFTER
from offbeat.liveness.status_record import Board, Wish
from offbeat.liveness.store import TimedStore
from offbeat.platform.process_group import TIMEOUT
from offbeat.transport.links import Links
from offbeat.transport.membership import Roster, read_roster
from offbeat.transport.meter import Meter
from offbeat.transport.world import World

POLL = 0.1  # seconds between two looks at the store
READ = 16  # members whose heartbeats tell whether a run goes on
ATTEMPTS = 20  # wishes until a rank gives up
MODEL = "model"  # the key of the fingerprint


def announce(links: Links, model: Exchanged, algorithm: Algorithm) -> None:
    """Let ranks join from now on; by the first rank, before any other can be past the start."""
    if links.run and links.world.rank == links.world.ranks[0]:
        links.store.set(MODEL, json.dumps(fingerprint(model, algorithm, "")))
        links.announce()


@final
@dataclass(eq=False)
class Pulse:
    """Tells whether a run goes on, by the heartbeats of some of its members."""

    store: TimedStore
    roster: Roster
    rank: int
    started: float = field(default_factory=time.monotonic)
    changed: float = field(default_factory=time.monotonic)
    is_rank_alive: bool = False  # another process has the number of this rank
    _beats: list[str | None] = field(default_factory=list)
    _own: str | None = None
    _looked: float = 0.0

    def is_over(self) -> bool:
        """Return whether all ranks have been silent for long; reads once per heartbeat."""
        now = time.monotonic()
        if now - self._looked > heartbeat.BEAT:
            self._looked = now
            self._look(now)
        return now - self.changed > 2 * heartbeat.SILENT_AFTER

    def _look(self, now: float) -> None:
        # Its keys are deleted at any time: after a change of its ranks, and after its end.
        store = self.store.under(f"{self.roster.name}/heartbeat")
        begun = store.find("ranks")
        if begun is None:
            return
        ranks = sorted(map(int, begun.split()))  # that have written a heartbeat
        beats = [store.find(f"rank{rank}") for rank in ranks[:: -(-len(ranks) // READ)]]
        if beats != self._beats:
            self._beats, self.changed = beats, now
        if self.rank in ranks:
            own = store.find(f"rank{self.rank}")
            is_late = now - self.started > heartbeat.BROKEN_AFTER
            self.is_rank_alive = is_late and None not in (self._own, own) and self._own != own
            self._own = own


@final
@dataclass(eq=False)
class Joining:
    """The attempts of a rank to join the run in the store of ``world``."""

    world: World
    model: Exchanged
    algorithm: Any
    meter: Meter = field(default_factory=Meter)
    fault: str | None = None  # why it cannot join, if it is known before
    attempts: int = 0
    number: int = -1
    has_warned: bool = False
    store: TimedStore = field(init=False)

    def connect(self) -> Connection | int:
        """Return the connection to a run that goes on, or the number of the run to start.

        Raises ``ValueError`` on this rank alone if it cannot join, and :class:`PeerLost` after
        many attempts.
        """
        self.store, pulse, since = TimedStore(self.world.store), None, time.monotonic()
        try:
            while True:
                roster = read_roster(self.store)
                if self.world.is_new and (not roster.name or (pulse and pulse.is_over())):
                    self._await_a_run(time.monotonic() - since)
                if not roster.name and not self.world.is_new:
                    return roster.run + 1
                if roster.name:
                    if pulse is None or pulse.roster != roster:
                        pulse = Pulse(self.store, roster, self._rank(roster))
                    links = self._wish(roster, pulse)
                    if links is not None:
                        return Connection(links.world, links, None)
                    if pulse.is_over() and not self.world.is_new:
                        return roster.run + 1
                time.sleep(POLL)
        except PeerLost:
            raise
        except RuntimeError as error:
            raise store_lost(error) from error
        finally:
            self.store.close()

    def _await_a_run(self, waited: float) -> None:
        """Warn a new rank that no run goes on, and end its wait at last."""
        if waited > TIMEOUT.total_seconds():
            raise PeerLost(f"no run to join has begun in this store within {waited:.0f} s")
        if waited > WARN_AFTER and not self.has_warned:
            self.has_warned = True
            warnings.warn(
                f"no run to join goes on in this store after {waited:.0f} s; waiting for one to "
                "begin. Do its ranks pass join=True and the same store?",
                RuntimeWarning,
                stacklevel=5,
            )

    def _rank(self, roster: Roster) -> int:
        if not self.world.is_new:
            return self.world.rank
        # A new rank that was in, and has tried again since, keeps the number that it got.
        return self.number if self.number in roster.lost else roster.next_rank

    def _wish(self, roster: Roster, pulse: Pulse) -> Links | None:
        """Make one attempt; return the links between all ranks if it succeeds.

        Otherwise the roster has changed, or another rank joins first, or the run is over.
        """
        rank = pulse.rank
        if rank in roster.ranks:
            self._await_own_loss(roster, pulse)
            return None
        self._require_fitting(roster, rank)
        board = Board(self.store.under(f"{roster.name}/heartbeat"))
        notices = board.read()
        if notices.wish is not None or notices.verdict is not None or notices.left is not None:
            return None
        if self.attempts == ATTEMPTS:
            raise PeerLost(
                f"rank {rank} could not join in {ATTEMPTS} attempts: each time a rank was lost "
                "meanwhile; the others go on without it"
            )
        self.attempts, self.number = self.attempts + 1, rank
        wish = Wish(rank, self.store.add("wishes", 1))
        lost = tuple(other for other in roster.lost if other != rank)
        nodes = tuple(sorted((*roster.nodes, (rank,))))
        world = replace(self.world, rank=rank, nodes=nodes, lost=lost, is_new=False)
        links = Links.joining(world, roster, wish.number, self.meter)
        gate = gate_of(self.store, roster.name, wish.number)
        try:
            if board.post(wish=wish).wish == wish and pass_gate(
                gate, links, lambda: self._is_hopeless(roster, pulse, board, wish)
            ):
                return links
        except BaseException:
            with contextlib.suppress(RuntimeError):
                close_gate(gate)
            links.abandon()
            raise
        links.abandon()
        return None

    def _is_hopeless(self, roster: Roster, pulse: Pulse, board: Board, wish: Wish) -> bool:
        time.sleep(POLL)
        if pulse.is_over() or read_roster(self.store) != roster:
            return True
        return board.read().wish != wish

    def _await_own_loss(self, roster: Roster, pulse: Pulse) -> None:
        """Wait until the others have noticed that the worker which had this number is lost."""
        while read_roster(self.store) == roster and not pulse.is_over():
            if pulse.is_rank_alive:
                raise ValueError(
                    f"rank {pulse.rank} takes part in the run already; give every worker a number "
                    "of its own, or rank=None to a new one"
                )
            time.sleep(POLL)

    def _require_fitting(self, roster: Roster, rank: int) -> None:
        """Raise ``ValueError`` if this rank cannot join, which the others then do not notice."""
        if rank not in roster.lost and rank != roster.next_rank:
            raise ValueError(
                f"rank {rank} cannot join the ranks {roster.ranks}: it is none of those that were "
                f"lost, {list(roster.lost)}; give rank=None to a new worker"
            )
        fault = (
            self.fault
            or argument_fault(self.model, self.algorithm)
            or join_fault(self.algorithm)
            or model_fault(self.model)
            or self.algorithm.parameters.growth_fault(len(roster.ranks) + 1)
        )
        if fault is None:
            there, here = (
                json.loads(self.store.get(MODEL)),
                fingerprint(self.model, self.algorithm, ""),
            )
            different = difference(there, json.loads(json.dumps(here)))
            fault = different and f"{different}; use the same versions, model and algorithm"
        if fault is not None:
            raise ValueError(f"rank {rank} cannot join the ranks {roster.ranks}: {fault}")
