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

from offbeat.platform.process_group import another_client, hang_up

Result = TypeVar("Result")

LIMIT = 15.0  # seconds for one call: as long as a rank may be silent, for a short cut of the link
TICK = 0.5  # seconds of one wait
ABSENT = "?"  # a value that no key has


class StoreSilent(RuntimeError):
    """Raised by a call that is not answered in time, and by all after it or a lost connection."""


@final
class TimedStore:
    """Calls a store on a thread of its own, for at most ``LIMIT`` seconds each; from any thread.

    A call of the store's own client ends only with an answer or a closed connection. A host that
    loses power, and a link that is cut, give neither.
    """

    def __init__(self, store: Store) -> None:
        """Connect to ``store`` once more."""
        self._call, self._prefix = _Caller(store), ""

    def under(self, prefix: str) -> "TimedStore":
        """Return the part of the store under ``prefix``, over the same connection."""
        part = copy.copy(self)
        part._prefix = f"{self._prefix}{prefix}/"
        return part

    def another_client(self) -> tuple[Store, frozenset[int]]:
        """Return a client that waits for no calls of this one, and its sockets to hang up."""
        return self._call.run(another_client)

    def set(self, key: str, value: str) -> None:
        """Write ``value``."""
        self._call("set", self._prefix + key, value)

    def get(self, key: str) -> bytes:
        """Return the value of a key that exists, and that no rank deletes meanwhile."""
        found: bytes = self._call("get", self._prefix + key)
        return found

    def find(self, key: str) -> str | None:
        """Return the value of a key, None if it does not exist or was deleted; never waits."""
        # One call: a key that another rank deletes after a check would block the get.
        found: str = self._call("compare_set", self._prefix + key, ABSENT, ABSENT).decode()
        return None if found == ABSENT else found

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys that exist."""
        found: list[bytes] = self._call("multi_get", [self._prefix + key for key in keys])
        return found

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all ``keys`` exist."""
        return bool(self._call("check", [self._prefix + key for key in keys]))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which starts at 0, and return its value."""
        return int(self._call("add", self._prefix + key, amount))

    def append(self, key: str, value: str) -> None:
        """Write ``value`` after what the key holds, if it exists."""
        self._call("append", self._prefix + key, value)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Write ``value`` if the key holds ``expected``, "" for no key; return what it holds."""
        found: bytes = self._call("compare_set", self._prefix + key, expected, value)
        return found

    def delete_key(self, key: str) -> None:
        """Delete a key, if it exists."""
        self._call("delete_key", self._prefix + key)

    def clear(self) -> None:
        """Delete all keys."""
        for key in self._call("list_keys"):
            if key.startswith(self._prefix):
                self._call("delete_key", key)

    def limit(self, seconds: float) -> None:
        """Give later calls only so much time, because this rank leaves."""
        self._call.limit = min(seconds, LIMIT)

    def close(self) -> None:
        """End the thread; calls that still wait, and later ones, raise."""
        self._call.end("this rank has closed it")


class _Caller:
    """Makes calls one after the other on a daemon thread, each with a time limit."""

    def __init__(self, store: Store) -> None:
        self.limit = LIMIT
        self._store: Store | None = None
        self._sockets: frozenset[int] = frozenset()
        self._process = os.getpid()
        self._why_ended: str | None = None
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._waiting: set[Future[Any]] = set()
        self._thread = threading.Thread(target=self._run, name="offbeat-store", daemon=True)
        self._thread.start()
        # A thread that returns from a call while the interpreter finalizes aborts the process.
        atexit.register(self._end_at_exit)
        # A client of the store serves one call at a time: with a clone, a blocking get of another
        # thread does not delay our calls.
        self._store, self._sockets = self._run_on(store, another_client)

    def __call__(self, method: str, *args: Any) -> Any:
        return self.run(methodcaller(method, *args))

    def run(self, call: Callable[[Store], Result]) -> Result:
        """Make one call; raise ``StoreSilent`` where it is not answered."""
        return self._run_on(self._store, call)

    def _run_on(self, store: Store | None, call: Callable[[Store], Result]) -> Result:
        answer: Future[Result] = Future()
        self._waiting.add(answer)
        try:
            if self._why_ended is not None or store is None:
                raise StoreSilent(self._why_ended)
            self._jobs.put((answer, partial(call, store)))
            # In small waits: a process that was stopped meanwhile, as a machine that sleeps, has
            # not listened, and must not take its own pause for one of the store.
            limit = self.limit
            for _ in range(max(1, round(limit / TICK))):
                with contextlib.suppress(TimeoutError):
                    return answer.result(min(TICK, limit))
            self.end(f"no answer for {limit:.0f} s: its host, or the link to it, is down")
            return answer.result()
        except DistNetworkError as error:  # torch's client stays broken, and logs every later call
            self.end(str(error))
            raise
        finally:
            self._waiting.discard(answer)

    def end(self, why: str) -> None:
        if os.getpid() != self._process:
            return  # a forked child: the thread is its parent's
        is_stuck = bool(self._waiting)
        self._why_ended, self._store = self._why_ended or why, None  # which closes its socket
        self._jobs.put(None)
        for answer in list(self._waiting):
            with contextlib.suppress(InvalidStateError):  # it has come after all
                answer.set_exception(StoreSilent(self._why_ended))
        if not is_stuck:
            self._thread.join(timeout=1.0)
            atexit.unregister(self._end_at_exit)

    def _end_at_exit(self) -> None:
        self.end("Python ends")
        if self._thread.is_alive():  # in a call, which keeps its client's sockets open
            with _without_stderr():
                hang_up(self._sockets)
                self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            answer, call = job
            try:
                result = call()
            except BaseException as error:
                with contextlib.suppress(InvalidStateError):  # given up
                    answer.set_exception(error)
            else:
                with contextlib.suppress(InvalidStateError):
                    answer.set_result(result)


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
