"""The beacon of a process: it answers for its heartbeats, whatever their Python code does.

A heartbeat stops where a call holds Python's lock for long. The beacon's native thread goes on to
answer. It falls silent together with the process: when that has ended, or its machine hangs.
"""

import itertools
import os
import secrets
import threading
from collections.abc import Sequence
from typing import NamedTuple, final

from torch.distributed import TCPStore

from offbeat.platform.answering import leave_server_to_parent, open_server


class Place(NamedTuple):
    """Where a beacon answers for one heartbeat, which is published with that.

    Attributes:
        hosts: addresses of the machine, of which not all need to be reachable.
        port: the port.
        key: a name that no other heartbeat has, on any machine; it begins with one of the process.
    """

    hosts: Sequence[str]
    port: int
    key: str

    @property
    def process(self) -> str:
        """A name that no other process has, on any machine."""
        return self.key.partition("/")[0]

    @property
    def of_process(self) -> "Place":
        """Where it answers as long as the process has any heartbeat."""
        return self._replace(key=self.process)


@final
class Beacon:
    """The server of this process, one for all its heartbeats; open while there is one."""

    def __init__(self) -> None:
        self._server: TCPStore | None = None
        self._keys: set[str] = set()
        self._process, self._numbers = secrets.token_hex(8), itertools.count()
        self._changing = threading.Lock()
        os.register_at_fork(after_in_child=self._leave_to_parent)

    def light(self, hosts: Sequence[str]) -> Place | None:
        """Answer for one more heartbeat, at ``hosts``; None if that is not possible."""
        if not hosts:
            return None
        with self._changing:
            self._server = self._server or open_server(is_ipv6=":" in hosts[0])
            if self._server is None:
                return None
            key = f"{self._process}/{next(self._numbers)}"
            for name in (self._process, key):
                self._server.set(name, "")
            self._keys.add(key)
            return Place(hosts, self._server.port, key)

    def put_out(self, place: Place) -> None:
        """Answer for that heartbeat no more; close the server after the last."""
        with self._changing:
            if self._server is None or place.key not in self._keys:
                return
            self._keys.discard(place.key)
            self._server.delete_key(place.key)
            if not self._keys:
                self._server = None

    def _leave_to_parent(self) -> None:
        if self._server is not None:
            leave_server_to_parent(self._server)
        self._server, self._keys, self._changing = None, set(), threading.Lock()
        self._process = secrets.token_hex(8)


beacon = Beacon()
