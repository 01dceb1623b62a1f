"""What this process knows of a store, so that one that is started again holds it once more.

The store keeps nothing on disk. Each process remembers the values it has written and read; when the
connection breaks it waits for the server to come back at its address, and writes them back.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from threading import Event
from typing import Any, TypeVar, final

from torch.distributed import DistNetworkError, Store

from offbeat.platform.process_group import another_client, hang_up
from offbeat.platform.tcp_store import listens

Result = TypeVar("Result")

AWAY = 60.0  # seconds in which the server must come back
PAUSE = 0.2  # seconds between two attempts to connect
KEPT = 4096  # keys that are remembered, the latest ones
HISTORY = 16  # earlier values of a key that are remembered


@final
class Mirror:
    """Calls a store through a server that is ended and started again; for one thread.

    An older value never replaces a newer one: of two values, the one that a process has seen
    before the other is the older.

    Attributes:
        is_away: whether it waits for the server.
    """

    def __init__(self, store: Store) -> None:
        """Connect to the server of ``store`` once more."""
        self.is_away = False
        self._ended = Event()
        self._client, self.sockets = another_client(store)
        address: Any = store
        self._address: tuple[str, int] = (address.host, address.port)
        self._texts: OrderedDict[str, deque[str]] = OrderedDict()  # the last value is the latest
        self._own: set[str] = set()  # keys that this process alone writes
        self._counts: dict[str, int] = {}
        self._lists: dict[str, list[str]] = {}  # words that this process has appended

    def set(self, key: str, value: str) -> None:
        """Write ``value``."""
        self._own.add(key)
        self.note(key, value)
        self._call(lambda client: client.set(key, value))

    def get(self, key: str) -> bytes:
        """Return the value of a key."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of ``keys``."""
        found: list[bytes] = self._call(lambda client: client.multi_get([*keys]))
        for key, value in zip(keys, found, strict=True):
            self.note(key, value.decode())
        return found

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Write ``value`` if the key holds ``expected``; return what it holds."""
        found: bytes = self._call(lambda client: client.compare_set(key, expected, value))
        if found.decode() == expected != value:
            return found  # of a key that does not exist, torch returns what was expected
        if found.decode() == expected:  # a look for a key that does not exist
            self._forget(key)
        else:
            self.note(key, found.decode())
        return found

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all ``keys`` exist."""
        return self._call(lambda client: client.check([*keys]))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter."""
        self._counts[key] = self._call(lambda client: client.add(key, amount))
        return self._counts[key]

    def append(self, key: str, value: str) -> None:
        """Write ``value``, which ends with a space, after what the key holds."""
        self._lists.setdefault(key, []).extend(value.split())
        self._call(lambda client: client.append(key, value))  # type: ignore[attr-defined]

    def delete_key(self, key: str) -> None:
        """Delete a key."""
        self._forget(key)
        self._call(lambda client: client.delete_key(key))

    def list_keys(self) -> list[str]:
        """Return all keys."""
        return self._call(lambda client: client.list_keys())

    def another_client(self) -> tuple[Store, frozenset[int]]:
        """Return a further client of the server, which is there, and its sockets."""
        self.check(["mirror"])  # waits for its answer
        return another_client(self._client)

    def break_off(self) -> None:
        """End a call that is not answered, from another thread: it will connect anew."""
        hang_up(self.sockets)

    def end(self) -> None:
        """Wait for the server no longer, from another thread."""
        self._ended.set()

    def _call(self, call: Callable[[Store], Result]) -> Result:
        try:
            return call(self._client)
        except DistNetworkError as error:
            lost = error
        until = time.monotonic() + AWAY
        while time.monotonic() < until and not self._ended.wait(PAUSE):
            try:
                self._come_back(until)
                return call(self._client)
            except DistNetworkError as error:  # it has gone again, or stays away
                lost = error
        host, port = self._address
        raise DistNetworkError(f"no store at {host}:{port} for {AWAY:.0f} s: {lost}")

    def _come_back(self, until: float) -> None:
        self.is_away = True
        try:
            while not listens(*self._address):
                if time.monotonic() > until or self._ended.wait(PAUSE):
                    raise DistNetworkError("nobody listens there")
            self._client, self.sockets = another_client(self._client)
            self._write_back()
        finally:
            self.is_away = False

    def note(self, key: str, value: str) -> None:
        """Remember a value that this process or another one has written."""
        seen = self._texts.setdefault(key, deque(maxlen=HISTORY))
        if not seen or seen[-1] != value:
            seen.append(value)
        self._texts.move_to_end(key)
        if len(self._texts) > KEPT:
            self._forget(next(iter(self._texts)))

    def _forget(self, key: str) -> None:
        self._texts.pop(key, None)
        self._own.discard(key)
        self._counts.pop(key, None)
        self._lists.pop(key, None)

    def _write_back(self) -> None:
        client = self._client
        for key, amount in self._counts.items():
            # Another process may have counted further: the larger number is the later one.
            if (missing := amount - client.add(key, 0)) > 0:
                client.add(key, missing)
        for key, seen in self._texts.items():
            if key in self._own:
                client.set(key, seen[-1])
            elif key not in self._lists:
                found = client.compare_set(key, "", seen[-1]).decode()
                while found != seen[-1] and found in seen:  # older than what is known here
                    found = client.compare_set(key, found, seen[-1]).decode()
        for key, words in self._lists.items():
            known = " ".join([*self._texts.get(key, deque([""]))[-1].split(), *words]).split()
            there = client.compare_set(key, "", " ").decode().split()
            for word in dict.fromkeys(known):
                if word not in there:
                    client.append(key, f"{word} ")  # type: ignore[attr-defined]
