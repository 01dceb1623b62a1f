"""A client of the store of which every call ends, in time or with an error."""

import atexit
import contextlib
import copy
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from functools import partial
from operator import methodcaller
from queue import SimpleQueue
from typing import Any, TypeVar, final

from torch.distributed import DistNetworkError, Store

from offbeat.liveness.store.mirror import Mirror
from offbeat.liveness.store.ticker import Ticker
from offbeat.platform.answering import own_hosts
from offbeat.platform.process_group import another_client, hang_up

Result = TypeVar("Result")

LIMIT = 7.0  # seconds for one call: longer than a rank may be silent, for a short cut of the link
TICK = 0.5  # seconds of one wait
ABSENT = "?"  # a value that no key has

_clients: "dict[Store, _Client]" = {}  # of this process
_sharing = threading.Lock()


class StoreSilent(RuntimeError):
    """Raised by a call that is not answered in time, and by all after it or a lost connection."""


@final
class TimedStore:
    """Calls a store for at most ``LIMIT`` seconds each; from any thread.

    A call of the store's own client ends only with an answer or a closed connection. A host that
    loses power, and a link that is cut, give neither. So a thread makes the calls, one for all who
    call the same store in this process.
    """

    def __init__(self, store: Store, *, returns: bool = False) -> None:
        """Connect to ``store`` once more, unless this process has done so.

        ``returns``: its server, a TCPStore, may be ended and started again at its address.
        """
        self._calls, self._prefix = _Calls(store, returns), ""

    def under(self, prefix: str) -> "TimedStore":
        """Return the part of the store under ``prefix``, over the same connection."""
        part = copy.copy(self)
        part._prefix = f"{self._prefix}{prefix}/"
        return part

    def another_client(self) -> tuple[Store, frozenset[int]]:
        """Return a client that waits for no calls of this one, and its sockets to hang up."""
        return self._calls.run(
            lambda s: s.another_client() if isinstance(s, Mirror) else another_client(s)
        )

    @property
    def own_hosts(self) -> list[str]:
        """The addresses of this machine by which those who call the store may reach it."""
        return own_hosts(self._calls.client.sockets)

    def ticker(self, rank: int, seconds: float) -> Ticker:
        """Return the thread of this process that calls functions of ``rank`` every ``seconds``."""
        return self._calls.client.tickers.setdefault(rank, Ticker(seconds, "offbeat-heartbeat"))

    def set(self, key: str, value: str) -> None:
        """Write ``value``."""
        self._calls("set", self._prefix + key, value)

    def remember(self, key: str, value: str) -> None:
        """Know what another rank has written, for a store that is started again without it."""
        at = self._prefix + key
        self._calls.run(lambda s: s.note(at, value) if isinstance(s, Mirror) else None)

    def get(self, key: str) -> bytes:
        """Return the value of a key that exists, and that no rank deletes meanwhile."""
        return bytes(self._calls("get", self._prefix + key))

    def find(self, key: str) -> str | None:
        """Return the value of a key, None if it does not exist or was deleted; never waits."""
        # One call: a key that another rank deletes after a check would block the get.
        found: str = self._calls("compare_set", self._prefix + key, ABSENT, ABSENT).decode()
        return None if found == ABSENT else found

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys that exist."""
        return list(self._calls("multi_get", [self._prefix + key for key in keys]))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all ``keys`` exist."""
        return bool(self._calls("check", [self._prefix + key for key in keys]))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which starts at 0, and return its value."""
        return int(self._calls("add", self._prefix + key, amount))

    def append(self, key: str, value: str) -> None:
        """Write ``value`` after what the key holds, if it exists."""
        self._calls("append", self._prefix + key, value)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Write ``value`` if the key holds ``expected``, "" for no key; return what it holds."""
        return bytes(self._calls("compare_set", self._prefix + key, expected, value))

    def delete_key(self, key: str) -> None:
        """Delete a key, if it exists."""
        self._calls("delete_key", self._prefix + key)

    def clear(self) -> None:
        """Delete all keys."""
        for key in self._calls("list_keys"):
            if key.startswith(self._prefix):
                self._calls("delete_key", key)

    def limit(self, seconds: float) -> None:
        """Give later calls only so much time, because this rank leaves."""
        self._calls.limit = min(seconds, LIMIT)

    def close(self) -> None:
        """End the calls that still wait, and later ones; the last user ends the thread."""
        self._calls.client.release(self._calls)


class _Calls:
    """The calls of one user of a client."""

    def __init__(self, store: Store, returns: bool) -> None:
        self.limit = LIMIT
        self._why_ended: str | None = None
        self._waiting: set[Future[Any]] = set()
        self.client = _Client.of(store, self, returns)
        self.run(lambda _: None)  # which connects

    def __call__(self, method: str, *args: Any) -> Any:
        return self.run(methodcaller(method, *args))

    def run(self, call: Callable[[Any], Result]) -> Result:
        """Return the result of one call; raise ``StoreSilent`` if it is not answered."""
        answer: Future[Result] = Future()
        self._waiting.add(answer)
        try:
            if self._why_ended is not None:
                raise StoreSilent(self._why_ended)
            self.client.jobs.put((answer, call))
            # In small waits: a process that was stopped meanwhile, as a machine that sleeps, has
            # not listened, and must not take its own pause for one of the store.
            limit = self.limit
            for is_again in (False, True):
                if is_again and (limit < LIMIT or not self.client.break_off()):
                    break
                looks = 0
                while looks < max(1, round(limit / TICK)):
                    with contextlib.suppress(TimeoutError):
                        return answer.result(min(TICK, limit))
                    looks += limit < LIMIT or not self.client.is_away
            # A rank that leaves waits for less: other replicas of its process may go on.
            end = self.client.end if limit == LIMIT else self.end
            end(f"no answer for {limit:.0f} s: its host, or the link to it, is down")
            return answer.result()
        except DistNetworkError as error:  # torch's client stays broken, and logs every later call
            self.client.end(str(error))
            raise
        finally:
            self._waiting.discard(answer)

    def end(self, why: str) -> None:
        """Let the calls that wait, and all later ones, raise."""
        self._why_ended = self._why_ended or why
        for answer in list(self._waiting):
            with contextlib.suppress(InvalidStateError):  # it has come after all
                answer.set_exception(StoreSilent(self._why_ended))


class _Client:
    """A connection to a store, and the daemon thread that makes its calls one after the other."""

    def __init__(self, store: Store, returns: bool) -> None:
        self.tickers: dict[int, Ticker] = {}
        self._users: set[_Calls] = set()
        self._store: Any = store  # or a mirror of it
        self._mirror: Mirror | None = None
        self._returns = returns
        self._sockets: frozenset[int] = frozenset()
        self._process = os.getpid()
        self._is_connected = self._is_calling = False
        self.jobs: SimpleQueue[tuple[Future[Any], Callable[[Any], Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="offbeat-store", daemon=True)
        self._thread.start()
        # A thread that returns from a call while the interpreter finalizes aborts the process.
        atexit.register(self._end_at_exit)

    @property
    def sockets(self) -> frozenset[int]:
        """The sockets of the connection."""
        return self._sockets if self._mirror is None else self._mirror.sockets

    @classmethod
    def of(cls, store: Store, user: _Calls, returns: bool) -> "_Client":
        """Return the client of this process for ``store``."""
        with _sharing:
            client = _clients.get(store)
            if client is None or client._store is None or client._process != os.getpid():
                client = _clients[store] = cls(store, returns)
            client._users.add(user)
            return client

    @property
    def is_away(self) -> bool:
        """Whether it waits for a server that is started again."""
        return self._mirror is not None and self._mirror.is_away

    def break_off(self) -> bool:
        """Connect anew, for a server that does not answer; return whether that is possible."""
        if self._mirror is not None:
            self._mirror.break_off()
        return self._mirror is not None

    def release(self, user: _Calls) -> None:
        """End the calls of ``user``, and the thread if it was the last."""
        user.end("this rank has closed it")
        with _sharing:
            self._users.discard(user)
        if not self._users:
            self.end("this rank has closed it")

    def end(self, why: str) -> None:
        """End the thread, and the calls of all users."""
        if os.getpid() != self._process:
            return  # a forked child: the thread is its parent's
        self._store = None  # which closes its socket
        if self._mirror is not None:
            self._mirror.end()
        self.jobs.put(None)
        for user in [*self._users]:
            user.end(why)
        if not self._is_calling:
            self._thread.join(timeout=1.0)
        if not self._thread.is_alive():
            atexit.unregister(self._end_at_exit)
        with _sharing:
            for store, client in [*_clients.items()]:
                if client is self:
                    del _clients[store]

    def _end_at_exit(self) -> None:
        self.end("Python ends")
        if self._thread.is_alive():  # in a call, which keeps its client's sockets open
            with _without_stderr():
                hang_up(self.sockets)
                self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while (job := self.jobs.get()) is not None:
            answer, call = job
            self._is_calling = True
            try:
                outcome = partial(answer.set_result, self._make(call))
            except BaseException as error:
                outcome = partial(answer.set_exception, error)
            self._is_calling = False
            with contextlib.suppress(InvalidStateError):  # given up
                outcome()

    def _make(self, call: Callable[[Any], Any]) -> Any:
        if (store := self._store) is None:
            raise StoreSilent("this rank has closed it")
        if not self._is_connected:
            # A client serves one call at a time: with a clone, a blocking get of another thread
            # does not delay our calls.
            if self._returns:
                self._store = store = self._mirror = Mirror(store)
            else:
                self._store, self._sockets = store, _ = another_client(store)
            self._is_connected = True
        return call(store)


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    # Torch logs a call that is ended so with the stack of its C++, which would hide the error.
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
