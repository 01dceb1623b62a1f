"""One direction of a link: its rate, latency, jitter and loss, as text and as numbers."""

from dataclasses import dataclass
from typing import final

from offbeat.kit import quantity

MAX_RATE = 600  # gbit: tc holds the bytes of a link's queue in 32 bits
_MIN_LATENCY, _MAX_LATENCY = 1e-3, 10.0
_MAX_LOSS = 0.5


@final
@dataclass(frozen=True)
class Wire:
    """Defines what one direction of a link does to packets, which keep their order.

    ``rate`` is in bit/s, None for no limit. A packet arrives after ``latency`` seconds, plus or
    minus up to ``jitter``. ``loss`` is the probability that it is lost.

    >>> print(Wire(100_000_000, 0.05, 0.005, 0.001))
    100 Mbit/s, 50 ± 5 ms one way, 0.1 % loss
    """

    rate: int | None = None
    latency: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0

    @property
    def delays(self) -> bool:
        """Whether it does more than a token bucket."""
        return self.latency > 0 or self.loss > 0

    def __str__(self) -> str:
        jitter = f" ± {self.jitter * 1e3:g}" if self.jitter else ""
        parts = ["no rate limit" if self.rate is None else quantity.rate(self.rate)]
        parts += [f"{self.latency * 1e3:g}{jitter} ms one way"] if self.latency else []
        return ", ".join(parts + ([f"{self.loss * 100:g} % loss"] if self.loss else []))


def parse_rate(text: str | None, name: str = "rate") -> int | None:
    """Parse a rate; None is no limit."""
    return None if text is None else quantity.parse_rate(text, MAX_RATE, name)


def parse_latency(text: str) -> float:
    """Parse the time of one way in seconds.

    >>> parse_latency("50ms")
    0.05
    """
    expected = "a number with us, ms or s, from 1ms to 10s, for one way; for example 50ms"
    return quantity.parse(
        text, "latency", quantity.TIME_UNITS, expected, _MIN_LATENCY, _MAX_LATENCY
    )


def parse_jitter(text: str | None, latency: float) -> float:
    """Parse a time in seconds of at most ``latency``, the shortest of all links."""
    if text is None:
        return 0.0
    expected = (
        f"a number with us, ms or s, at most the latency of {latency * 1e3:g} ms; for example "
        f"{latency * 1e2:g}ms"
    )
    return quantity.parse(text, "jitter", quantity.TIME_UNITS, expected, 0.0, latency)


def parse_loss(text: str | None) -> float:
    """Parse a probability in per cent.

    >>> parse_loss("0.1%")
    0.001
    """
    expected = "a percentage from 0% to 50%; for example 0.1%"
    return (
        0.0 if text is None else quantity.parse(text, "loss", {"%": -2}, expected, 0.0, _MAX_LOSS)
    )
