"""Every wait ends: a sign of life from each rank, and one verdict when something is wrong.

Gloo's own error names a socket at best, and only at a neighbour of the lost rank; everybody else
would wait for ever. So each rank keeps a heartbeat in the store, with what it is doing. A rank
whose wait lasts looks at the others' and writes the first fault it finds into the store; all
ranks then end their waits with that same verdict.
"""

import atexit
import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Literal

import torch
from torch.distributed import PrefixStore, ProcessGroup, Store

from offbeat.comm.process_group import backends_of

BEAT = 1.0  # seconds between two signs of life
SILENT_AFTER = 15.0  # seconds without a sign of life until a rank counts as lost
BROKEN_AFTER = 5.0  # the same, once a connection has broken


class PeerLost(RuntimeError):
    """A rank of the world has died or left; raised alike on all survivors."""


class Heartbeat:
    """This rank's sign of life, and its watch over the others while it waits.

    ``phase`` is the number of calls to collective verbs so far and the verb this rank is in
    ("step", "finish", ...), or "" between calls. Extra memory: none. Traffic: one small write a
    second, and one small read a second while a wait lasts longer than that.
    """

    def __init__(self, store: Store, rank: int, ranks: tuple[int, ...]) -> None:
        """Start beating as ``rank`` of the world's ``ranks``."""
        # A store's client serves one caller at a time: a clone keeps our beat out of the way of
        # somebody's blocking get.
        self._store = PrefixStore(
            "heartbeat",
            store.clone(),  # type: ignore[attr-defined]  # missing in torch's stubs
        )
        self.rank, self.ranks = rank, ranks
        self.phase: tuple[int, str] = (0, "")
        self._groups: list[ProcessGroup] = []
        self._waiting_since: float | None = None
        self._attending_since: float | None = None
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._silent: dict[int, bytes] = {}  # the last beat of those that we found silent
        self._verdict: Exception | None = None
        self._stop = threading.Event()
        self._count = 0
        self._beat()
        self._thread = threading.Thread(target=self._run, name="offbeat-heartbeat", daemon=True)
        self._thread.start()
        # A daemon thread that wakes up inside a finalizing interpreter aborts the process.
        atexit.register(self._end_thread)

    def guard(self, group: ProcessGroup) -> None:
        """End the waits on ``group`` too when there is a verdict."""
        self._groups.append(group)

    @contextlib.contextmanager
    def verb(self, name: str) -> Iterator[None]:
        """Tell the others that this rank is in the collective call ``name``."""
        outer, self.phase = self.phase, (self.phase[0], name)
        try:
            yield
        finally:
            self.phase = outer  # a step may join a backward on its way

    def next_call(self) -> None:
        """One more collective verb is done; all ranks must have called the same one."""
        self.phase = (self.phase[0] + 1, "")

    def release(self, group: ProcessGroup) -> None:
        """This rank leaves: end what still waits on ``group``, and tell nobody."""
        self._stop.set()
        _end_waits(group)

    def require_no_verdict(self) -> None:
        """Raise the verdict, if there is one."""
        if self._verdict is not None:
            raise self._verdict

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the others during a wait of the training thread."""
        self.require_no_verdict()
        self._waiting_since = time.monotonic()
        try:
            with self.explaining():
                yield
        finally:
            self._waiting_since = None

    @contextlib.contextmanager
    def attending(self) -> Iterator[None]:
        """Watch from a lane, meanwhile, whether the others live; whatever they do is fine."""
        self._attending_since = time.monotonic()
        try:
            yield
        finally:
            self._attending_since = None

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Turn an error of the wire into the verdict of all ranks; from any thread."""
        try:
            yield
        except RuntimeError as error:
            raise self._explain(error) from error

    def condemn(self, error: Exception) -> Exception:
        """Publish ``error`` as the verdict of all ranks, unless another came first."""
        kind = "user" if isinstance(error, ValueError) else "lost"
        said = json.dumps({"kind": kind, "text": str(error)})
        with contextlib.suppress(RuntimeError):  # the store is gone: our own verdict must do
            said = self._store.compare_set("verdict", "", said).decode()
        verdict = json.loads(said)
        cls = ValueError if verdict["kind"] == "user" else PeerLost
        self._verdict = cls(verdict["text"])
        return self._verdict

    def gone(self, since: float) -> dict[int, Literal["left", "lost"]]:
        """Who has left (detach), and who gives no sign of life; one look at the store.

        Silence counts from ``since``, except that of a rank which was found silent before and has
        not beaten again: whoever found it knows already.
        """
        found: dict[int, Literal["left", "lost"]] = {}
        for rank, (_, verb), silence in self._signs(since):
            if verb == "left":
                found[rank] = "left"
            elif silence > BROKEN_AFTER or self._silent.get(rank) == self._seen[rank][0]:
                found[rank] = "lost"
        return found

    def stop(self) -> None:
        """Say goodbye and end the thread."""
        if self._stop.is_set():
            return
        self._end_thread()
        atexit.unregister(self._end_thread)
        self.phase = (self.phase[0], "left")
        self.forget_groups()
        with contextlib.suppress(RuntimeError):
            self._beat()

    def forget_groups(self) -> None:
        """Let go of the groups whose waits :meth:`guard` was told to end."""
        self._groups.clear()

    def _end_thread(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while not self._stop.wait(BEAT):
            self._tick()

    def _beat(self) -> None:
        self._count += 1
        self._store.set(f"rank{self.rank}", json.dumps([self._count, *self.phase]))

    def _tick(self) -> None:
        try:
            self._beat()
            now, since, attending = time.monotonic(), self._waiting_since, self._attending_since
            if since is not None and now - since > BEAT:
                self._judge(since, SILENT_AFTER, self.phase)
            elif attending is not None and now - attending > BEAT:
                self._judge(attending, SILENT_AFTER, None)
        except RuntimeError as error:
            self._verdict = PeerLost(_store_is_gone(error))
        waits = self._waiting_since is not None or self._attending_since is not None
        if self._verdict is not None and waits:
            for group in self._groups:
                _end_waits(group)

    def _judge(self, since: float, patience: float, mine: tuple[int, str] | None) -> None:
        """Look at everyone's heartbeat once, and condemn the first fault.

        ``mine`` is the phase in which this rank waits for all; None if only death is a fault.
        """
        if self._store.check(["verdict"]):
            self.condemn(PeerLost("unreachable: a verdict stands already"))
            return
        waited = time.monotonic() - since
        for rank, phase, silence in self._signs(since):
            if silence > patience:
                self._silent[rank] = self._seen[rank][0]
            fault = self._fault(rank, phase, mine, silence, patience, waited)
            if fault is not None:
                self.condemn(fault)
                return

    def _signs(self, since: float) -> Iterator[tuple[int, tuple[int, str], float]]:
        """The other ranks, their phases, and for how long they have been silent."""
        now = time.monotonic()
        # A rank that has not attached yet has no key, and asking for it would block.
        others = [rank for rank in self.ranks if self._store.check([f"rank{rank}"])]
        beats = self._store.multi_get([f"rank{rank}" for rank in others])
        for rank, beat in zip(others, beats, strict=True):
            if rank == self.rank:
                continue
            if self._seen.get(rank, (b"", 0.0))[0] != beat:
                self._seen[rank] = (beat, now)
            _, calls, verb = json.loads(beat)
            yield rank, (calls, verb), now - max(self._seen[rank][1], since)

    def _fault(
        self,
        rank: int,
        phase: tuple[int, str],
        mine: tuple[int, str] | None,
        silence: float,
        patience: float,
        waited: float,
    ) -> Exception | None:
        calls, verb = phase
        if verb == "left":
            if mine is not None and (calls <= mine[0] or waited > patience):
                return PeerLost(
                    f"rank {rank} has left (detach) after {calls} calls, while rank {self.rank} "
                    f"waits in {_call(mine)}; call detach() on all ranks after the same step"
                )
        elif silence > patience:
            return PeerLost(
                f"rank {rank} is lost: no sign of life for {silence:.0f} s, last "
                f"heard of in {_call((calls, verb))}. Look at the end of its log, then start again "
                "from the last checkpoint"
            )
        elif mine is None:
            return None
        elif verb and mine[1] and calls == mine[0] and verb != mine[1]:
            return ValueError(
                f"rank {rank} is in {_call((calls, verb))}, but rank {self.rank} is in "
                f"{_call(mine)}; all ranks must make the same calls in the same order"
            )
        elif mine[1] not in ("", "step") and calls > mine[0] and waited > patience:
            # Nobody passes a call of the whole world without us, unless it made another one.
            return ValueError(
                f"rank {rank} has gone on to call {calls}, but rank {self.rank} is in "
                f"{_call(mine)}; all ranks must make the same calls in the same order"
            )
        return None

    def _explain(self, error: RuntimeError) -> Exception:
        """Find out why a wait ended in an error; ask the heartbeats until one tells."""
        since = time.monotonic()
        while self._verdict is None and time.monotonic() - since < SILENT_AFTER + 2 * BEAT:
            if self._stop.is_set():
                return PeerLost(f"rank {self.rank} leaves: {error}")  # no verdict on the others
            try:
                self._judge(since, BROKEN_AFTER, self.phase)
            except RuntimeError as gone:
                self._verdict = PeerLost(_store_is_gone(gone))
            self._stop.wait(0.2)
        return self._verdict or self.condemn(
            PeerLost(f"rank {self.rank}: an exchange failed although all ranks live: {error}")
        )


def _call(phase: tuple[int, str]) -> str:
    return f"{phase[1] or 'its own code'} (call {phase[0]})"


def _store_is_gone(error: RuntimeError) -> str:
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return f"the launcher is lost: it hosts the store, which no longer answers ({error})"
    return f"rank 0 is lost: it hosts the store, which no longer answers ({error})"


def _end_waits(group: ProcessGroup) -> None:
    """Make every pending wait on ``group`` raise.

    ``abort()`` does not wake a blocked Gloo receive. But a receive that times out makes Gloo fail
    all pairs of the group, and with them all its waits: so we let one time out on purpose. From
    each peer in turn: where the peer has closed its side, ours fails at once and wakes nobody.
    """
    for device, backend in backends_of(group).items():
        if backend != "gloo":
            with contextlib.suppress(RuntimeError):
                group.abort()
        elif device.type == "cpu":
            for peer in set(range(group.size())) - {group.rank()}:
                with contextlib.suppress(RuntimeError):
                    work = group.recv([torch.empty(1)], peer, 2**30)
                    work.wait(timedelta(milliseconds=1))
