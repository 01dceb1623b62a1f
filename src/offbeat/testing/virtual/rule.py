"""Which settings of an exchange are simulated."""

from typing import Any


def require(exchange: Any, **expected: object) -> None:
    """Raise ``ValueError`` if a setting differs from the only one that is simulated."""
    for name, value in expected.items():
        found = getattr(exchange, name)
        if found != value:
            raise ValueError(
                f"{type(exchange).__name__}({name}={found!r}): virtual workers know "
                f"{name}={value!r} only; use offbeat.testing.simulate"
            )
