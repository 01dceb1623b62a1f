"""Quantities as text: formatting for tables, reports and progress, and parsing of options."""

import re
from collections.abc import Mapping
from math import inf

from rich.filesize import pick_unit_and_suffix

TIME_UNITS = {"ns": -9, "us": -6, "ms": -3, "s": 0}  # for parse
_BYTES = ["B", "kB", "MB", "GB", "TB"]
_BITS_PER_SECOND = ["bit/s", "kbit/s", "Mbit/s", "Gbit/s"]


def seconds(value: float) -> str:
    """Format a time with three significant digits.

    >>> seconds(0.0123), seconds(0.8534), seconds(75.31), seconds(0)
    ('12.3 ms', '0.853 s', '75.3 s', '0 s')
    """
    if 0 < value < 0.1:
        return f"{_digits(value * 1e3)} ms"
    return f"{_digits(value)} s"


def size(value: float) -> str:
    """Format bytes with three significant digits in decimal units, as network rates are.

    >>> size(18_315_696), size(640), size(0)
    ('18.3 MB', '640 B', '0 B')
    """
    unit, suffix = pick_unit_and_suffix(int(value), _BYTES, 1000)
    return f"{_digits(value / unit)} {suffix}"


def rate(value: int) -> str:
    """Format bits per second.

    >>> rate(250_000_000), rate(1_500_000_000)
    ('250 Mbit/s', '1.5 Gbit/s')
    """
    unit, suffix = pick_unit_and_suffix(value, _BITS_PER_SECOND, 1000)
    return f"{value / unit:g} {suffix}"


def times(value: float) -> str:
    """Format a factor with three significant digits.

    >>> times(2.7134), times(12.71)
    ('2.71×', '12.7×')
    """
    return f"{_digits(value)}×"


def percent(value: float) -> str:
    """Format a fraction in per cent.

    >>> percent(0.934)
    '93 %'
    """
    return f"{value:.0%}".replace("%", " %")


def loss(value: float) -> str:
    """Format a loss with four significant digits, since methods often differ in the last ones.

    >>> loss(2.31456), loss(0.0123456), loss(2)
    ('2.315', '0.01235', '2.000')
    """
    return f"{value:#.4g}".rstrip(".") if 1 <= value < 1e4 else f"{value:.4g}"


def distance(value: float) -> str:
    """Format a distance of replicas with three significant digits; '0' if they are equal.

    >>> distance(0.0), distance(0.15234)
    ('0', '0.152')
    """
    return f"{value:.3g}"


def parse(
    text: str,
    name: str,
    powers: Mapping[str, int],
    expected: str,
    least: float = 0.0,
    most: float = inf,
) -> float:
    """Parse a number with a unit, which is a power of ten; raises ValueError with ``expected``.

    >>> parse("100us", "latency", {"us": -6, "ms": -3}, "a number with us or ms")
    0.0001
    """
    match = re.fullmatch(rf"(\d+(?:\.\d+)?)({'|'.join(powers)})", text.strip().lower())
    value = float(f"{match[1]}e{powers[match[2]]}") if match else -inf
    if not least <= value <= most:
        raise ValueError(f"{name}: got {text!r}, expected {expected}")
    return value


def parse_rate(text: str, most: int = 10**6, name: str = "rate") -> int:
    """Parse a rate such as "250mbit" or "1.5gbit", of at most ``most`` gbit, into bits per second.

    >>> parse_rate("250mbit")
    250000000
    """
    expected = f"a number with kbit, mbit or gbit, from 1kbit to {most}gbit; for example 250mbit"
    return round(parse(text, name, {"kbit": 3, "mbit": 6, "gbit": 9}, expected, 1e3, most * 1e9))


def _digits(value: float) -> str:
    """Format with three significant digits; numbers of 1e-4 and above get no exponent."""
    if value == 0 or value >= 999.5:
        return f"{value:.0f}"
    return f"{value:#.3g}".rstrip(".")
