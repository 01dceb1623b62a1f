"""TCP's windows on far links: what a connection may send before the first bytes are confirmed."""

from dataclasses import dataclass
from typing import final

SEGMENT = 1448  # bytes of payload of a packet
FIRST = 10 * SEGMENT  # the window of a new connection, and of one that was idle for long
PATIENCE = 0.2  # seconds of Linux's retransmission timeout beside the round trip
FAR = 5e-3  # seconds of one way: below, windows are wide enough


def lossy(loss: float, round_trip: float) -> float:
    r"""Return the mean window of a connection that loses packets at random, in bytes.

    .. math:: W = \max\left(1.05 \sqrt[4]{\frac{RTT^3}{p^3}}, \frac{1.22}{\sqrt p}\right)

    packets under cubic, Linux's default (RFC 9438, section 5, with its C of 0.4 and beta of 0.7),
    whose window is at least that of Reno (Mathis et al., 1997).

    >>> round(8 * lossy(0.001, 0.1) / 0.1 / 1e6, 1)  # Mbit/s
    4.5
    """
    if loss == 0:
        return float("inf")
    cubic = 1.054 * (round_trip / loss) ** 0.75
    return SEGMENT * float(max(cubic, 1.22 / loss**0.5))


@final
@dataclass
class Windows:
    """The windows of connections that are used alike, whose messages pass one after the other.

    A window grows by what is confirmed, so that it doubles with every round trip in which it was
    used up, to twice of what was on its way at once. It halves with every retransmission timeout in
    which the connection was idle, but to no less than 10 packets: rare messages are slow for their
    first round trips.
    """

    size: float = 0.0  # bytes; 0 before the first message
    last: float = 0.0  # when the connections were last in use

    def rest(self, at: float, trip: float) -> None:
        """Let windows shrink, and note that the connections are in use."""
        halvings = min(60, int(max(0.0, at - self.last) / (trip + PATIENCE)))
        self.size, self.last = max(FIRST, self.size / 2**halvings), max(self.last, at)

    def wait(self, at: float, nbytes: float, seconds: float, trip: float, most: float) -> float:
        """Return how long a message of ``nbytes`` from ``at`` on waits for confirmations.

        It passes in ``seconds`` where windows do not matter, ``trip`` are those of the round trip;
        ``most``: the largest mean window.
        """
        fits = nbytes * trip / seconds if seconds > 0 else float("inf")  # bytes of a round trip
        self.rest(at, trip)
        start = window = max(FIRST, min(self.size, most))
        left, lost, at_once = nbytes, 0.0, 0.0
        while left > window and window < min(fits, most):
            left, lost = left - window, lost + trip - seconds * window / nbytes
            at_once, window = window, 2 * window
        at_once = min(fits, max(at_once, min(left, window)))
        self.size = max(start, min(start + nbytes, 2 * at_once, most))
        if left > most and most < fits:
            lost += left * (trip / most - seconds / nbytes)
        # The last bytes leave half a round trip after the word of the receive.
        self.last = max(self.last, at + trip / 2 + seconds + lost)
        return lost
