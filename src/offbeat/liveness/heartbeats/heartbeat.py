"""Failure detection by heartbeats: every wait ends, with one error on all ranks.

The error of Gloo names a socket at best, and is raised only at a neighbour of the lost rank; all
others would wait until the timeout of the process group. So each rank writes a heartbeat into the
store, with the collective call it is in, reads those of a few others (:mod:`~.ring`), and asks
their beacons. A rank that waits, and reads a fault, writes it into the store as the agreed error.
All ranks then end their waits with that error.
"""

import atexit
import contextlib
import os
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from threading import Event
from typing import Literal, final

from torch.distributed import ProcessGroup

from offbeat.liveness.error_context import ErrorContext, forget_locals
from offbeat.liveness.failure import PeerLost
from offbeat.liveness.heartbeats import crossed_waits
from offbeat.liveness.heartbeats.beacon import Place
from offbeat.liveness.heartbeats.beat import BeatWriter
from offbeat.liveness.heartbeats.calls import Calls
from offbeat.liveness.heartbeats.diagnosis import (
    Ahead,
    Wait,
    comes_to_front,
    different_steps,
    find_fault,
    store_lost,
)
from offbeat.liveness.heartbeats.ring import Patience, Sign, WatchRing
from offbeat.liveness.heartbeats.status_record import (
    AgreedError,
    Failure,
    HearRequest,
    JoinRequest,
    Status,
)
from offbeat.liveness.heartbeats.timeout import Timeout, find_absence, unexplained
from offbeat.liveness.interrupt import interrupts
from offbeat.liveness.store.client import TimedStore
from offbeat.platform.process_group import end_waits, has_kernels

BEAT = 1.0  # seconds between two heartbeats
LOOKS = 4  # looks of a rank that waits, and questions whether a connection is closed, in that time
MUTE_AFTER = 6.0  # seconds without a heartbeat and an answer until a rank counts as lost
SILENT_AFTER = 15.0  # seconds without a heartbeat, if its beacon cannot be asked
BROKEN_AFTER = 5.0  # the same, once a connection has broken
PROMPT = 2.0  # seconds in which a store that is not lost answers a rank that leaves
POLL = 0.02  # seconds between two looks for an agreed error that the thread of the heartbeat finds


@final
class Heartbeat(Calls):
    """Heartbeat of this rank, written by a thread, which also reads those of some others.

    Its three contexts differ in what they check: :meth:`watching` expects all ranks in the same
    collective call, :meth:`attending` only that they are running, :meth:`explaining` only replaces
    the error of a wait that has failed already.

    Extra memory: none. Traffic per second, in a world of any size: one small write, one small read
    and three more while this rank waits or one may come back, a question to each of three others.
    Where the store does not keep up, beats slow down and patience grows by the same factor.
    """

    def __init__(
        self,
        store: TimedStore,
        rank: int,
        ranks: tuple[int, ...],
        name: str = "",
        places: Mapping[int, Place] | None = None,
    ) -> None:
        """Start the thread of ``rank``, one of the world's ``ranks``; ``name``: the replica.

        ``places``: beacons of other ranks that this one has asked before.
        """
        super().__init__(rank, ranks, name)
        self._store = store.under("heartbeat")
        self._groups: list[tuple[ProcessGroup, Collection[int] | None]] = []
        self._timeout = Timeout(self._groups, self._store)
        self._waiting_since: float | None = None
        self._attending_since: float | None = None
        self._failed_since: float | None = None
        self._failure: Failure | None = None
        self._has_met_another = self._has_kernels = False
        self._agreed: Exception | None = None
        self._ahead = Ahead()
        self.hear_request: HearRequest | None = None  # at every look; None if a loss ends the run
        self.expects = False  # whether a lost rank may come back, and is to be let in soon
        self._process, self._started, self._is_leaving = os.getpid(), time.monotonic(), Event()
        crossed_waits.add(self)
        interrupts.open(self)
        self._writer = BeatWriter(self._store, rank)
        # Now: whoever is announced can be read.
        self._ring = WatchRing(self._store, rank, ranks, places)
        self._ticker = store.ticker(rank, BEAT / LOOKS)
        self._ticker.add(self._tick)
        # A daemon thread that wakes up while the interpreter finalizes aborts the process.
        atexit.register(self._end_at_exit)

    @property
    def has_agreed_error(self) -> bool:
        """Whether the ranks have agreed on an error."""
        return self._agreed is not None

    @property
    def places(self) -> Mapping[int, Place]:
        """The beacons of the ranks that it watches."""
        return self._ring.places

    def guard(self, group: ProcessGroup, connected: Collection[int] | None = None) -> None:
        """End the waits on ``group`` too after an agreed error; ``connected``: the peers."""
        self._has_kernels |= has_kernels(group)
        self._groups.append((group, connected))

    @property
    def is_waiting(self) -> bool:
        """Whether this rank has waited for some time, in the training thread."""
        return time.monotonic() - (self._waiting_since or float("inf")) > BEAT

    def raise_agreed_error(self) -> None:
        """Raise the agreed error, if there is one."""
        if self._agreed is not None:
            raise self._agreed

    def look_for_agreed_error(self) -> None:
        """Read the agreed error from the store, and raise it if there is one."""
        self._adopt(self._ring.record.read())
        self.raise_agreed_error()

    def look_at_once(self) -> None:
        """Let the thread look now, where it would in a quarter of a heartbeat."""
        self._ticker.wake()

    def watching(self) -> AbstractContextManager[None]:
        """Check the others' heartbeats during a wait of the training thread."""
        return ErrorContext(self._explain, self._begin_wait, self._end_wait)

    def _begin_wait(self) -> None:
        self.raise_agreed_error()
        interrupts.begin_wait()
        self._waiting_since = time.monotonic()

    def _end_wait(self) -> None:
        self._waiting_since = None

    @contextlib.contextmanager
    def attending(self) -> Iterator[None]:
        """Check, in a wait of a group's own thread, that the others are running, in any phase."""
        self._attending_since = time.monotonic()
        try:
            yield
        finally:
            self._attending_since = None

    def explaining(self) -> AbstractContextManager[None]:
        """Replace a ``RuntimeError`` by the agreed error of all ranks; from any thread."""
        return ErrorContext(self._explain)

    def report_error(self, error: Exception) -> Exception:
        """Make ``error`` the agreed error unless there is one; return the agreed error."""
        agreed = AgreedError.of(error)
        with contextlib.suppress(RuntimeError):  # without a store, this rank's own error must do
            self._adopt(self._ring.record.post(agreed=agreed))
        # Another thread may have found one meanwhile, and a store that is lost since changes none.
        self._agreed = self._agreed or agreed.error
        return self._agreed

    def report_pairing(self) -> Exception:
        """Make it the agreed error that gradients met those of another step; name such a rank."""
        own, self._has_met_another = self.phase, True
        self._await_agreed_error(4 * BEAT)
        self._has_met_another = False
        return self._agreed or self.report_error(different_steps(self.rank, own))

    def release(self, group: ProcessGroup, connected: Collection[int] | None) -> None:
        """End this rank's waits on ``group``, without an agreed error on the others."""
        self._is_leaving.set()
        end_waits(group, connected)

    def absent(self, since: float) -> list[int]:
        """Return the ranks without a first heartbeat that are lost.

        Those whose process has ended, and all once this rank waits for long ``since``.
        """
        is_late = time.monotonic() - since > SILENT_AFTER * self._ticker.stretch
        missing = {*self.ranks}.difference(self._ring.begun)
        return sorted(missing if is_late else missing.intersection(self._ring.ended))

    def gone(self, suspects: Collection[int]) -> dict[int, Literal["left", "lost"]]:
        """Return which of ``suspects`` have left (detach) or are lost, by the last look at them.

        From now on every look reads their heartbeats too, with the patience of a failure.
        """
        if suspects != self._ring.suspects:
            self._ring.suspects = suspects
            self._ticker.wake()
        self._fail(None)
        found = {rank: how for rank in suspects if (how := self._ring.gone.get(rank)) is not None}
        return found | dict.fromkeys({*suspects}.intersection(self.absent(self._started)), "lost")

    def ask(self, before: JoinRequest | None, request: JoinRequest | None) -> None:
        """Write ``request`` in the place of ``before`` into the status record; None for none."""
        self._ring.record.change(
            lambda old: old._replace(request=request) if old.request == before else old
        )

    def stop(self, has_left: bool = True) -> None:
        """Publish that this rank has left, unless it is to count as lost, and end the thread."""
        if self._is_leaving.is_set() or os.getpid() != self._process:
            return
        crossed_waits.remove(self)
        interrupts.close(self)
        self._end_thread()
        atexit.unregister(self._end_at_exit)
        self.phase = self.phase._replace(verb="left")
        self.forget(*(group for group, _ in self._groups))
        if has_left:
            with contextlib.suppress(RuntimeError):
                self._beat(self._ticker.stretch)
                self._ring.record.post(left=self.rank)
        self._writer.end()  # not before: whoever finds it out reads whether we have left

    def forget(self, *groups: ProcessGroup) -> None:
        """Drop groups of :meth:`guard`, and works that the agreed error has ended."""
        self._groups[:] = [pair for pair in self._groups if pair[0] not in groups]
        forget_locals(self._agreed)

    def _end_thread(self) -> None:
        self._is_leaving.set()
        self._store.limit(PROMPT)
        if not self._ticker.remove(self._tick, PROMPT):
            self._store.close()
            self._ticker.remove(self._tick, PROMPT)
        self._ring.close()

    def _end_at_exit(self) -> None:
        if os.getpid() != self._process:
            return  # a forked child: the heartbeat is its parent's
        self._end_thread()
        self._writer.end_with_script(self._ticker.stretch, self.phase)

    def _beat(self, stretch: float) -> None:
        self._writer.write(stretch, self.phase, crossed_waits.elsewhere(self))

    def _tick(self) -> None:
        try:
            stretch, has_news = self._ticker.stretch, self._ring.probe(self._patience)
            if is_due := self._writer.is_due(BEAT * stretch * (1 - 0.5 / LOOKS)):
                self._beat(stretch)
            if is_due or has_news or self.expects or self._wait() is not None:
                self._judge()
            if interrupts.came_in(self._waiting_since):
                self.report_error(
                    PeerLost(f"rank {self.rank} was interrupted in {self.phase}: SIGINT")
                )
        except RuntimeError as error:
            self._agreed = self._agreed or store_lost(error)
        waits = self._waiting_since is not None or self._attending_since is not None
        if self._agreed is not None:
            for group, connected in self._groups:  # or the script waits for a stream, perhaps
                end_waits(group, connected if waits else ())

    @property
    def _patience(self) -> Patience:
        return Patience(SILENT_AFTER, BROKEN_AFTER, MUTE_AFTER, BEAT, self._ticker.stretch)

    def _wait(self) -> Wait | None:
        """Return the wait of this rank, if it lasts for some time or has failed."""
        now, phase, is_met = time.monotonic(), self.phase, self._has_met_another
        for since, calling, least, patience in (
            (self._failed_since, phase, 0.0, BROKEN_AFTER),
            (self._waiting_since, phase, BEAT / LOOKS, SILENT_AFTER),
            (self._attending_since, None, BEAT / LOOKS, SILENT_AFTER),
        ):
            if since is not None and now - since > least:
                late = now - since > patience * self._ticker.stretch
                return Wait(self.rank, calling, self._members, late, is_met, late)
        return Wait(self.rank, phase, self._members, False, True) if is_met else None

    def _judge(self) -> None:
        """Look once, and make the first fault the agreed error if this rank waits, or goes on."""
        wait, exchanges = self._wait(), self.phase.verb == "backward"
        is_joined = wait is not None and (exchanges or wait.has_met_another)
        status, signs = self._ring.look(self._members if is_joined else (), self._patience)
        if self.hear_request is not None:
            self.hear_request(status.request)
            wait = wait and self._ahead.excuse(wait, self.phase.calls, signs, self._patience)
        if self.hear_request is not None or self._has_kernels:
            wait = wait or Wait(self.rank, None, self._members)  # its next step finds a loss
        if wait is not None:
            self._adopt(status)
        if self._agreed is not None or status.agreed is not None:
            return
        failure = status.failure
        fault = failure and find_absence(failure, self.rank, self.phase)
        if fault is None and wait is not None:
            faults = (find_fault(sign, wait) or self._crossed(sign, wait) for sign in signs)
            fault = next((fault for fault in faults if fault is not None), None)
            if comes_to_front(wait, status.front, signs):
                self._ring.record.change(
                    lambda old: old._replace(front=self.rank) if old.front == status.front else old
                )
        if fault is not None:
            self.report_error(fault)
        elif (mine := self._failure) is not None and mine.precedes(failure):
            self._ring.record.change(
                lambda old: old._replace(failure=mine) if mine.precedes(old.failure) else old
            )
        elif (since := self._waiting_since) is not None:
            self._timeout.warn(self.rank, self.phase, time.monotonic() - since)

    def _adopt(self, status: Status) -> None:
        self._agreed = self._agreed or (status.agreed and status.agreed.error)

    def _crossed(self, sign: Sign, wait: Wait) -> Exception | None:
        """Return the error, also of the other replica, if its rank and ours wait crosswise."""
        given = self, sign.rank, sign.phase, sign.elsewhere
        return crossed_waits.report_crossed(*given) if wait.phase and wait.is_late else None

    def _fail(self, timeout: float | None) -> None:
        """Tell all ranks, by the thread, that an exchange has failed: they lose patience sooner."""
        if self._failure is None:
            self._failure = Failure(self.rank, self.phase, timeout)
            self._failed_since = time.monotonic()

    def _await_agreed_error(self, seconds: float) -> None:
        """Let the thread look for the cause of an error, for so many seconds at most."""
        since = time.monotonic()
        self._ticker.wake()
        while self._agreed is None and time.monotonic() - since < seconds * self._ticker.stretch:
            if self._is_leaving.wait(POLL):
                return

    def _explain(self, error: RuntimeError) -> Exception:
        """Find out why a wait has failed: look at heartbeats until one shows the cause."""
        is_leaving = self._is_leaving.is_set
        if self._agreed is None and not is_leaving():
            self._fail(self._timeout.behind(error))
            self._await_agreed_error(SILENT_AFTER + 2 * BEAT)
        if self._agreed is None and is_leaving():
            return PeerLost(f"rank {self.rank} leaves: {error}")  # no agreed error on the others
        failure = self._ring.record.status.failure
        return self._agreed or self.report_error(unexplained(self.rank, error, failure))
