"""Questions to the beacon of another rank: whether its process runs, and answers."""

import errno
import math
import select
import socket
from typing import final

from offbeat.liveness.heartbeats.beacon import Place
from offbeat.platform.answering import GREETING, HERE, NOT_HERE, question

_answered: set[tuple[str, int, str]] = set()  # host, port and process, of those that have answered


@final
class Probe:
    """One connection to the beacon of a rank; no call waits for anything.

    The operating system closes the connection when the process ends, and refuses a new one. A
    process that is stopped, a machine that hangs and a link that is cut give no answer.

    A refusal counts only where this very process has answered before, for any of its heartbeats and
    to any rank of ours: an address may mean another machine here than there, as behind NAT, in
    containers with equal addresses, or by a wrong file of host names. After a loss or a join, all
    know at once of the end of those that they have watched before.

    Traffic: one message of 34 bytes and one of one byte for each question.

    Attributes:
        is_refused: whether the last connection was refused.
        has_ended: whether the process has ended, or answers for this rank no more.
        mute_since: when the first question was asked that has no answer, None if all have one.
    """

    def __init__(self, place: Place) -> None:
        """Connect at the first look."""
        self.place = place
        self.is_refused = self.has_ended = False
        self.mute_since: float | None = None
        self._connection: socket.socket | None = None
        self._unsent = b""
        self._question = question(place.key)
        self._asked, self._took = -math.inf, 0.0
        known = (number for number, host in enumerate(place.hosts) if self._at(host) in _answered)
        self._attempts = next(known, 0)

    @property
    def is_known(self) -> bool:
        """Whether its process has answered once, for any of its heartbeats."""
        return self._at(self._host) in _answered

    def look(self, now: float, every: float) -> None:
        """Take an answer that has come, and ask again ``every`` seconds."""
        late = max(every, 4 * self._took)
        if self.mute_since is not None and now - self._asked > late:
            # After a cut of the link, a new connection comes about sooner than the old one.
            self._fail(TimeoutError())
        for _ in range(2):  # one that has broken is opened again at once
            if self.has_ended:
                return
            try:
                self._talk(now, every)
                return
            except BlockingIOError:
                return
            except OSError as error:
                self._fail(error)

    def close(self) -> None:
        """Close the connection; a look opens another one."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    @property
    def _host(self) -> str:
        return self.place.hosts[self._attempts % len(self.place.hosts)]

    def _at(self, host: str) -> tuple[str, int, str]:
        return host, self.place.port, self.place.process

    def _talk(self, now: float, every: float) -> None:
        is_due = now - self._asked >= every
        if self._connection is None and (self.is_known or is_due):
            self._connection = self._connect(now)
        if (connection := self._connection) is None:
            return
        if self._unsent:
            self._send(connection)
        try:
            self._hear(connection.recv(1), now)
        except BlockingIOError:
            if self.mute_since is not None:
                raise
        if is_due and self.mute_since is None:
            self._ask(self._question, now)
            self._send(connection)

    def _connect(self, now: float) -> socket.socket:
        host = self._host
        connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._ask(GREETING + self._question, now)
        code = connection.connect_ex((host, self.place.port))
        if code not in (0, errno.EINPROGRESS):
            connection.close()
            raise OSError(code, "no connection")
        return connection

    def _ask(self, text: bytes, now: float) -> None:
        self._unsent, self._asked = text, now
        self.mute_since = now if self.mute_since is None else self.mute_since

    def _send(self, connection: socket.socket) -> None:
        poll = select.poll()
        poll.register(connection, select.POLLOUT)
        if not poll.poll(0):
            raise BlockingIOError
        if code := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(code, "no connection")
        if connection.getsockname() == connection.getpeername():
            raise ConnectionRefusedError  # to itself, by the free port that it was given
        self._unsent = self._unsent[connection.send(self._unsent) :]

    def _hear(self, answer: bytes, now: float) -> None:
        if answer == HERE:
            _answered.add(self._at(self._host))
            self._took, self.mute_since = now - self._asked, None
        elif answer == NOT_HERE and self.is_known:
            self.has_ended = True
            self.close()
        else:
            raise ConnectionResetError

    def _fail(self, error: OSError) -> None:
        self.close()
        self.is_refused = isinstance(error, ConnectionRefusedError)
        if self.is_known:
            self.has_ended = self.is_refused
        else:
            self._attempts += 1  # at another address
            self.mute_since = None
