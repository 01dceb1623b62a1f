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
from typing import Any

from torch.distributed import TCPStore

from offbeat.liveness.heartbeats.heartbeat import Heartbeat
from offbeat.liveness.store.client import TimedStore

CLIENTS = 256  # in one process, each with two threads and a connection
VICTIMS = (5, 6, 7)  # neighbours, in a process of their own
POLL = 0.02  # seconds between two looks for verdicts
Verdicts = list[tuple[float, str]]  # when, as time.monotonic(), and the text


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
            self._port = free.getsockname()[1]
        self._size = size
        self._processes: list[mp.process.BaseProcess] = []
        self._host = self._start(_host, self._port)
        self._host.recv()
        living = [rank for rank in range(size) if rank not in VICTIMS]
        parts = [living[i : i + CLIENTS] for i in range(0, len(living), CLIENTS)]
        self._victims = self._start(_beat, VICTIMS, size, self._port)
        self._victim = self._processes[-1]
        self._parts = [self._start(_beat, part, size, self._port) for part in parts]
        for line in (self._victims, *self._parts):
            line.recv()  # all have begun
        for _ in range(burning):
            self._start(_burn)
        for line in (self._victims, *self._parts):
            line.send("wait")

    def calls(self) -> tuple[Counter[str], float]:
        """Return the calls of all ranks but the victims, and the store's seconds of CPU so far."""
        total: Counter[str] = Counter()
        for line in self._parts:
            line.send("calls")
            total += line.recv()
        self._host.send("")
        return total, self._host.recv()

    def verdicts(self) -> Verdicts:
        """Return the verdicts found so far."""
        for line in self._parts:
            line.send("verdicts")
        return [each for line in self._parts for each in line.recv()]

    def kill(self) -> float:
        """Kill the victims; return when."""
        return self._send(signal.SIGKILL)

    def freeze(self) -> float:
        """Stop the victims as on a host that hangs: their connections stay open; return when."""
        return self._send(signal.SIGSTOP)

    def _send(self, what: signal.Signals) -> float:
        assert self._victim.pid is not None, "it was started"
        os.kill(self._victim.pid, what)
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
        if not line.poll(POLL):
            continue
        line.send(Counter(calls) if line.recv() == "calls" else list(found.values()))


def _text(heart: Heartbeat) -> str:
    try:
        heart.raise_agreed_error()
    except Exception as verdict:
        return str(verdict)
    return ""


def cores() -> int:
    """The number of cores that the processes may use."""
    return len(os.sched_getaffinity(0))
