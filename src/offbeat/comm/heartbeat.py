"""Failure detection by heartbeats: every wait ends, with one error on all ranks.

The error of Gloo names a socket at best, and is raised only at a neighbour of the lost rank; all
others would wait until the timeout of the process group. So each rank writes a heartbeat into the
store, with the collective call it is in. A rank whose wait lasts reads the others' heartbeats and
writes the first fault that it finds into the store, as the verdict; all ranks then end their waits
with that verdict.
"""

import atexit
import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from typing import Literal, final

from torch.distributed import ProcessGroup

from offbeat.comm import several_replicas
from offbeat.comm.failure import FailureDetector, PeerLost, Phase
from offbeat.comm.heartbeat_reader import HeartbeatReader, Sign
from offbeat.comm.process_group import end_waits, timeout_of
from offbeat.comm.timed_store import TimedStore
from offbeat.comm.verdict import (
    Wait,
    different_backwards,
    find_absence,
    find_fault,
    publish,
    store_lost,
)

BEAT = 1.0  # seconds between two heartbeats
SILENT_AFTER = 15.0  # seconds without a heartbeat until a rank counts as lost
BROKEN_AFTER = 5.0  # the same, once a connection has broken
PROMPT = 2.0  # seconds in which a store that is not lost answers a rank that leaves


@final
class Heartbeat(FailureDetector):
    """Heartbeat of this rank, written by a thread, which also checks the others during waits.

    Extra memory: none. Traffic: one small write per second, and one small read per second during
    a wait that lasts longer than that.
    """

    def __init__(
        self, store: TimedStore, rank: int, ranks: tuple[int, ...], name: str = ""
    ) -> None:
        """Start the thread of ``rank``, one of the world's ``ranks``; ``name``: the replica."""
        self.name = name
        self._store = store.under("heartbeat")
        self.rank, self.ranks = rank, ranks
        self._phase = Phase()
        self._members: tuple[int, ...] = ()  # that the exchange of gradients joins
        self._groups: list[ProcessGroup] = []
        self._waiting_since: float | None = None
        self._attending_since: float | None = None
        self._reader = HeartbeatReader(self._store, rank, ranks)
        self._verdict: Exception | None = None
        self._stop = threading.Event()
        self._count, self._process = 0, os.getpid()
        several_replicas.add(self)
        self._beat()
        self._reader.begin()  # after the heartbeat: whoever is counted can be read
        self._thread = threading.Thread(target=self._run, name="offbeat-heartbeat", daemon=True)
        self._thread.start()
        # A daemon thread that wakes up while the interpreter finalizes aborts the process.
        atexit.register(self._end_thread)

    @property
    def has_verdict(self) -> bool:
        """Whether the ranks have agreed on an error."""
        return self._verdict is not None

    def guard(self, group: ProcessGroup) -> None:
        """End the waits on ``group`` too when there is a verdict."""
        self._groups.append(group)

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that join its present call."""
        return self._members if self._phase.verb == "backward" else self.ranks

    @property
    def is_waiting(self) -> bool:
        """Whether this rank has waited for some time, in the training thread."""
        since = self._waiting_since
        return since is not None and time.monotonic() - since > BEAT

    @property
    def phase(self) -> Phase:
        """The collective call in which this rank is."""
        return self._phase

    @contextlib.contextmanager
    def verb(self, name: str) -> Iterator[None]:
        """Publish, from the next heartbeat on, that this rank is in the call ``name``."""
        outer, self._phase = self._phase, self._phase._replace(verb=name)
        try:
            yield
        finally:
            self._phase = outer

    @contextlib.contextmanager
    def backward(self, members: tuple[int, ...]) -> Iterator[None]:
        """Publish that this rank is in the exchange of a backward between ``members``."""
        phase, self._members = self._phase, members
        begun = phase._replace(exchanges=phase.exchanges + 1, turn=phase.turn + 1)
        self._phase = begun._replace(verb="backward")
        try:
            yield
        finally:
            self._phase = begun

    def next_call(self, verb: str) -> None:
        """Count a completed collective call; all ranks must have made the same one."""
        phase = self._phase
        steps = phase.steps + (verb == "step")
        self._phase = phase._replace(calls=phase.calls + 1, verb="", steps=steps, turn=0)

    def resume(self, phase: Phase) -> None:
        """Continue the count of calls from ``phase``."""
        self._phase = phase._replace(verb="")

    def require_no_verdict(self) -> None:
        """Raise the verdict, if there is one."""
        if self._verdict is not None:
            raise self._verdict

    def look_for_verdict(self) -> None:
        """Read the verdict from the store, and raise it if there is one."""
        if self._store.check(["verdict"]):
            raise self.condemn(PeerLost("unreachable: a verdict stands already"))

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Check the others' heartbeats during a wait of the training thread."""
        self.require_no_verdict()
        self._waiting_since = time.monotonic()
        try:
            with self.explaining():
                yield
        finally:
            self._waiting_since = None

    @contextlib.contextmanager
    def attending(self) -> Iterator[None]:
        """Check, in a wait of a group's own thread, that the others are running, in any phase."""
        self._attending_since = time.monotonic()
        try:
            yield
        finally:
            self._attending_since = None

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Replace a ``RuntimeError`` by the verdict of all ranks; from any thread."""
        try:
            yield
        except RuntimeError as error:
            raise self._explain(error) from error

    def condemn(self, error: Exception) -> Exception:
        """Make ``error`` the verdict of all ranks unless there is one; return the verdict."""
        stands = publish(error, self._store)
        # Another thread may have found one meanwhile, and a store that is lost since changes none.
        self._verdict = self._verdict or stands
        return self._verdict

    def condemn_pairing(self) -> Exception:
        """Make it the verdict that gradients met those of another step; name such a rank."""
        since, own = time.monotonic(), self._phase
        with contextlib.suppress(RuntimeError):
            self._beat()  # the other side looks for ours
            while self._verdict is None and time.monotonic() - since < 4 * BEAT:
                for sign in self._reader.read(since):
                    other = sign.phase
                    if sign.rank in self._members and _is_other_backward(other, own):
                        wait = Wait(self.rank, own, self._members, 0.0)
                        return self.condemn(different_backwards(sign, wait))
                self._stop.wait(BEAT / 10)
        return self.condemn(
            ValueError(
                f"rank {self.rank} is in {own}, and its gradients met those of another step; make "
                "equally many backwards in every step on all ranks"
            )
        )

    def release(self, group: ProcessGroup) -> None:
        """End this rank's waits on ``group``, without a verdict on the others."""
        self._stop.set()
        end_waits(group)

    def gone(self, since: float) -> dict[int, Literal["left", "lost"]]:
        """Return the ranks that have left (detach) or are lost; one look at the store.

        Silence counts from ``since``, except that of a rank which was found silent before and has
        not written a heartbeat since. A rank may be lost before its first heartbeat.
        """
        return self._reader.gone(since, BROKEN_AFTER)

    def stop(self) -> None:
        """Publish that this rank has left, and end the thread."""
        if self._stop.is_set() or os.getpid() != self._process:
            return
        several_replicas.remove(self)
        self._end_thread()
        atexit.unregister(self._end_thread)
        self._phase = self._phase._replace(verb="left")
        self.forget_groups()
        with contextlib.suppress(RuntimeError):
            self._beat()

    def forget_groups(self) -> None:
        """Drop the groups that :meth:`guard` was given."""
        self._groups.clear()

    def _end_thread(self) -> None:
        if os.getpid() != self._process:
            return  # a forked child: the heartbeat is its parent's
        self._stop.set()
        self._store.limit(PROMPT)
        self._thread.join(timeout=PROMPT)
        if self._thread.is_alive():
            self._store.close()
            self._thread.join(timeout=PROMPT)

    def _run(self) -> None:
        while not self._stop.wait(BEAT):
            self._tick()

    def _beat(self) -> None:
        self._count += 1
        self._store.set(
            f"rank{self.rank}",
            json.dumps([self._count, several_replicas.elsewhere(self), *self._phase]),
        )

    def _tick(self) -> None:
        try:
            self._beat()
            now, since, attending = time.monotonic(), self._waiting_since, self._attending_since
            if since is not None and now - since > BEAT:
                self._judge(since, SILENT_AFTER, self._phase)
            elif attending is not None and now - attending > BEAT:
                self._judge(attending, SILENT_AFTER, None)
        except RuntimeError as error:
            self._verdict = self._verdict or store_lost(error)
        waits = self._waiting_since is not None or self._attending_since is not None
        if self._verdict is not None and waits:
            for group in self._groups:
                end_waits(group)

    def _judge(self, since: float, patience: float, phase: Phase | None) -> None:
        """Read all heartbeats once, and make the first fault the verdict."""
        if self._store.check(["verdict"]):
            self.condemn(PeerLost("unreachable: a verdict stands already"))
            return
        wait = Wait(self.rank, phase, self._members, time.monotonic() - since)
        for sign in self._reader.read(since):
            if sign.silence > patience:
                self._reader.note_silence(sign.rank)
            fault = find_fault(sign, wait, patience)
            if fault is None and phase is not None and wait.seconds > patience:
                fault = self._crossed(sign)
            if fault is not None:
                self.condemn(fault)
                return

    def _crossed(self, sign: Sign) -> Exception | None:
        """Return the error, also of the other replica, if its rank and ours wait crosswise."""
        found = several_replicas.crossed(
            self, sign.rank, sign.phase, self._reader.elsewhere[sign.rank]
        )
        return None if found is None else found[0].condemn(found[1])

    def _judge_absence(self, since: float) -> None:
        """Make it the verdict that a rank, which is alive, did not come before the timeout."""
        if not self._groups:
            return  # the first one could not be opened: a matter of the network, not of a rank
        for sign in self._reader.read(since):
            if sign.silence < 2 * BEAT:
                absence = find_absence(sign, self.rank, self.phase, timeout_of(self._groups[0]))
                if absence is not None:
                    self.condemn(absence)
                    return

    def _explain(self, error: RuntimeError) -> Exception:
        """Find out why a wait has failed: read heartbeats until one shows the cause."""
        since = time.monotonic()
        while self._verdict is None and time.monotonic() - since < SILENT_AFTER + 2 * BEAT:
            if self._stop.is_set():
                return PeerLost(f"rank {self.rank} leaves: {error}")  # no verdict on the others
            try:
                self._judge(since, BROKEN_AFTER, self._phase)
                if self._verdict is None and "imed out" in str(error):  # the words of Gloo
                    self._judge_absence(since)
            except RuntimeError as gone:
                self._verdict = self._verdict or store_lost(gone)
            self._stop.wait(0.2)
        return self._verdict or self.condemn(
            PeerLost(f"rank {self.rank}: an exchange failed although all ranks live: {error}")
        )


def _is_other_backward(other: Phase, own: Phase) -> bool:
    """Return whether the same exchange, counted from the start, belongs to another step there."""
    return (
        other.verb == "backward" and other.exchanges == own.exchanges and other.calls != own.calls
    )
