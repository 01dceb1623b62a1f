"""The measurement of a link by a TCP connection of our own: it names what Gloo only waits for.

A client asks for the time, again and again (b"?"), or sends bytes until it closes its side (b"!").
"""

import contextlib
import socket
import struct
import threading
import time
from dataclasses import dataclass, replace
from statistics import median
from typing import final

_NUMBER = struct.Struct("d")  # a time, or a rate
_TRIPS = 20
_BLOCK = 2**16
_UNSENT = 2**17  # bytes that wait in the sender: what follows the last block stays short
CONNECT = 3.0  # seconds
_SILENCE = 10.0  # seconds after which a peer is not waited for


@final
@dataclass(frozen=True)
class Link:
    """What one rank measured to another, in one direction; ``error`` if it could not connect."""

    source: int
    target: int
    error: str = ""
    mbit: float = 0.0  # payload per second, while all ranks send
    round_trip_ms: float = 0.0
    ahead_ms: float = 0.0  # by how much the clock of the target is ahead


@final
class Listener:
    """Answers the probes of other ranks, in threads of its own."""

    def __init__(self, host: str) -> None:
        """Listen on a free port, as Gloo does."""
        self._socket = socket.create_server((host, 0))
        self.address: tuple[str, int] = self._socket.getsockname()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no further connections."""
        self._socket.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=_answer, args=(connection,), daemon=True).start()


@final
class Probe:
    """A connection to the listener of another rank, over which the link is measured."""

    def __init__(self, source: int, target: int, address: tuple[str, int]) -> None:
        """Connect, and measure round trips, which would wait behind what is sent later."""
        self.link = Link(source, target)
        try:
            self._socket = socket.create_connection(address, CONNECT)
            self._socket.settimeout(_SILENCE)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            trips = sorted(_ask_time(self._socket) for _ in range(_TRIPS))
        except OSError as error:
            self._fail(error, f"{address[0]}:{address[1]}: ")
            return
        round_trip, ahead = median(trip for trip, _ in trips), trips[0][1]
        self.link = replace(self.link, round_trip_ms=round_trip * 1e3, ahead_ms=ahead * 1e3)

    def send(self, seconds: float) -> Link:
        """Send for ``seconds``, or 20 round trips if that is longer; return the whole result."""
        if not self.link.error:
            try:
                with self._socket:
                    rate = _send(self._socket, max(seconds, 0.02 * self.link.round_trip_ms))
                self.link = replace(self.link, mbit=rate * 8 / 1e6)
            except OSError as error:
                self._fail(error)
        return self.link

    def _fail(self, error: OSError, place: str = "") -> None:
        self.link = replace(self.link, error=f"{place}{error.strerror or error}")


def _ask_time(connection: socket.socket) -> tuple[float, float]:
    """Return the seconds of a round trip, and by how much the other clock is ahead."""
    before, start = time.time(), time.perf_counter()
    connection.sendall(b"?")
    theirs = _receive(connection)
    trip = time.perf_counter() - start
    return trip, theirs - before - trip / 2


def _send(connection: socket.socket, seconds: float) -> float:
    """Send for some seconds; return the bytes per second that the other side counted."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT)
    connection.sendall(b"!")
    block, end = bytes(_BLOCK), time.perf_counter() + seconds
    while time.perf_counter() < end:
        connection.sendall(block)
    connection.shutdown(socket.SHUT_WR)
    return _receive(connection)


def _answer(connection: socket.socket) -> None:
    with contextlib.suppress(OSError), connection:
        connection.settimeout(_SILENCE)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while (asked := connection.recv(1)) == b"?":
            connection.sendall(_NUMBER.pack(time.time()))
        if asked == b"!":
            connection.sendall(_NUMBER.pack(_count(connection)))


def _count(connection: socket.socket) -> float:
    """Return the bytes per second of the second half of what arrives.

    The first half holds what a link lets pass at once, and the slow start of TCP.
    """
    buffer, total, marks = bytearray(_BLOCK), 0, [(time.perf_counter(), 0)]
    while count := connection.recv_into(buffer):
        total += count
        marks.append((time.perf_counter(), total))
    middle = next(mark for mark in marks if mark[1] >= total / 2)
    return (total - middle[1]) / max(marks[-1][0] - middle[0], 1e-6)


def _receive(connection: socket.socket) -> float:
    found = b""
    while len(found) < _NUMBER.size:
        part = connection.recv(_NUMBER.size - len(found))
        if not part:
            raise ConnectionError("the other side closed the connection")
        found += part
    (number,) = _NUMBER.unpack(found)
    return float(number)
