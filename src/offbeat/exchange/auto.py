"""The wish that the method of a run be chosen, and chosen again, while it goes on."""

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True)
class Auto:
    """Algorithms as text, in the order of preference."""

    candidates: tuple[str, ...]
