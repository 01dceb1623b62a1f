"""Many ranks that do nothing but beat: heartbeats of offbeat on one real TCPStore."""

import multiprocessing as mp
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from torch.distributed import TCPStore

from offbeat.liveness.heartbeats.heartbeat import Heartbeat
from offbeat.liveness.store.client import TimedStore

CLIENTS = 256  # in one process, each with two threads and a connection
VICTIMS = (5, 6, 7)  # neighbours, in a process of their own
POLL = 0.02  # seconds between two looks for verdicts


class Look(NamedTuple):
    """What has happened so far, on all ranks but the victims."""

    calls: Counter[str]  # of the store; "keys": those that were read
    verdicts: list[tuple[float, str]]  # when, as time.monotonic(), and the text
    cpu: float  # seconds, of the store


class Counting:
    """A store that counts its calls and the keys that are read, together with its clones."""

    def __init__(self, store: TCPStore, calls: Counter[str]) -> None:
        self.store, self.calls = store, calls

    def clone(self) -> "Counting":
        return Counting(self.store.clone(), self.calls)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.calls["keys"] += len(keys)
        self.calls["multi_get"] += 1
        return self.store.multi_get(keys)

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self.store, name)


class Swarm:
    """Processes: one with the store, some with the ranks, one with the victims, some that burn."""

    def __init__(self, size: int, burning: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._processes: list[mp.process.BaseProcess] = []
        self._host = self._start(_host, port)
        self._host.recv()
        living = [rank for rank in range(size) if rank not in VICTIMS]
        parts = [living[i : i + CLIENTS] for i in range(0, len(living), CLIENTS)]
        _, *self._parts = lines = [
            self._start(_beat, part, size, port) for part in (VICTIMS, *parts)
        ]
        self._victim = self._processes[1].pid or 0
        for line in lines:
            line.recv()  # all have begun
        for _ in range(burning):
            self._start(_burn)
        for line in lines:
            line.send("wait")

    def look(self) -> Look:
        """Ask all processes."""
        for line in (self._host, *self._parts):
            line.send("look")
        found = [line.recv() for line in self._parts]
        calls = sum((calls for calls, _ in found), Counter())
        return Look(calls, [each for _, told in found for each in told], self._host.recv())

    def fail(self, is_frozen: bool) -> float:
        """Kill the victims, or stop them as on a host that hangs: connected; return when."""
        os.kill(self._victim, signal.SIGSTOP if is_frozen else signal.SIGKILL)
        return time.monotonic()

    def end(self) -> None:
        """Kill all processes, the store last."""
        for process in reversed(self._processes):
            process.kill()
            process.join()

    def _start(self, work: Callable[..., None], *args: object) -> Connection:
        ours, theirs = mp.Pipe()
        process = mp.get_context("spawn").Process(target=work, args=(*args, theirs), daemon=True)
        process.start()
        self._processes.append(process)
        return ours


def _host(port: int, line: Connection) -> None:
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    while store:
        line.send(time.process_time())
        line.recv()


def _burn(_: Connection) -> None:
    while True:
        pass


def _beat(ranks: Sequence[int], size: int, port: int, line: Connection) -> None:
    """Start the heartbeats of ``ranks``, then answer messages."""
    threading.stack_size(2**18)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    calls: Counter[str] = Counter()
    store: Any = Counting(TCPStore("127.0.0.1", port, is_master=False), calls)
    TimedStore.own_hosts = property(lambda _: ["127.0.0.1"])  # which it cannot tell by the wrapper
    hearts = [Heartbeat(TimedStore(store), rank, tuple(range(size))) for rank in ranks]
    found: dict[int, tuple[float, str]] = {}
    line.send("begun")
    line.recv()
    waits = ExitStack()
    for heart in hearts:
        waits.enter_context(heart.verb("step"))
        waits.enter_context(heart.watching())
    while True:
        for heart in hearts:
            if heart.has_agreed_error and heart.rank not in found:
                found[heart.rank] = time.monotonic(), _text(heart)
        if line.poll(POLL):
            line.recv()
            line.send((Counter(calls), list(found.values())))


def _text(heart: Heartbeat) -> str:
    try:
        heart.raise_agreed_error()
    except Exception as verdict:
        return str(verdict)
    return ""
