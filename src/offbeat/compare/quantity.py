"""Numbers as people read them."""

import math


def seconds(value: float) -> str:
    """Three significant digits.

    >>> seconds(0.0123), seconds(0.8534), seconds(75.31), seconds(0)
    ('12.3 ms', '0.853 s', '75.3 s', '0 s')
    """
    if 0 < value < 0.1:
        return f"{_digits(value * 1e3)} ms"
    return f"{_digits(value)} s"


def size(value: float) -> str:
    """Bytes in decimal units, as network rates are.

    >>> size(18_315_696), size(640), size(0)
    ('18.3 MB', '640 B', '0 B')
    """
    for unit, one in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= one:
            return f"{_digits(value / one)} {unit}"
    return f"{_digits(value)} B"


def rate(value: float) -> str:
    """Bits per second.

    >>> rate(250e6), rate(1.5e9)
    ('250 Mbit/s', '1.5 Gbit/s')
    """
    unit, one = ("Gbit/s", 1e9) if value >= 1e9 else ("Mbit/s", 1e6)
    return f"{value / one:g} {unit}"


def times(value: float) -> str:
    """A factor.

    >>> times(2.7134), times(12.71)
    ('2.71×', '12.7×')
    """
    return f"{_digits(value)}×"


def percent(value: float) -> str:
    """A share.

    >>> percent(0.934)
    '93 %'
    """
    return f"{value:.0%}".replace("%", " %")


def loss(value: float) -> str:
    """Four significant digits, since methods differ in the last ones.

    >>> loss(2.31456), loss(0.0123456)
    ('2.315', '0.01235')
    """
    return f"{value:.4g}" if value < 1 or value >= 1e4 else f"{value:.{3 - _exponent(value)}f}"


def distance(value: float) -> str:
    """Three significant digits; zero where replicas are equal.

    >>> distance(0.0), distance(0.15234)
    ('0', '0.152')
    """
    return f"{value:.3g}"


def _digits(value: float) -> str:
    """Three significant digits, and never an exponent."""
    return "0" if value == 0 else f"{value:.{max(0, 2 - _exponent(value))}f}"


def _exponent(value: float) -> int:
    # Of the rounded value: 9.996 has four digits before it is cut to three.
    return math.floor(math.log10(float(f"{abs(value):.2e}")))
