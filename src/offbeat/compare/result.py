"""What a comparison found, as plain data."""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal, final

from offbeat.compare.curves import Course

State = Literal["done", "failed", "interrupted"]


@final
@dataclass(frozen=True)
class Spread:
    """The median over rounds, with the least and the greatest.

    >>> Spread.of([3.0, None, 1.0])
    Spread(median=2.0, min=1.0, max=3.0)
    """

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Spread | None":
        """Of the values that are there; None if there are none, or one is not finite."""
        known = [value for value in values if value is not None]
        if not known or not all(map(math.isfinite, known)):
            return None
        return cls(median(known), min(known), max(known))


@final
@dataclass(frozen=True)
class Setup:
    """What was the same for all methods."""

    script: str
    arguments: tuple[str, ...]
    ranks_per_node: tuple[int, ...]
    rate: int | None  # bit/s of every node's link; None where the network is not shaped
    unshaped: str | None  # why the network is not shaped; None if it is
    started: str
    software: str


@final
@dataclass(frozen=True)
class Result:
    """One method in numbers; what is not known is None. See :class:`~.measure.Measures`.

    ``floor`` is the least a step can take: the time of a step without communication, or that of
    its bytes and their TCP headers on the node's link, whichever is longer; ``share_of_floor`` is its part in the time
    a step does take. That and ``faster``, than the baseline, are ratios within a round.
    """

    name: str
    state: State
    note: str | None
    is_baseline: bool
    is_floor: bool
    rounds: int
    seconds_per_step: Spread | None = None
    faster: Spread | None = None
    floor: Spread | None = None
    share_of_floor: Spread | None = None
    bytes_per_step: Spread | None = None
    stall_per_step: Spread | None = None
    final_loss: Spread | None = None
    heldout_loss: Spread | None = None
    seconds_to_target: Spread | None = None
    consensus_distance: Spread | None = None
    course: Course | None = None
    last_lines: tuple[str, ...] = ()  # of the rank that failed


@final
@dataclass(frozen=True)
class Comparison:
    """What ``offbeat compare`` found; one :class:`Result` for each method, in their order."""

    setup: Setup
    steps: int | None
    rounds: int
    baseline: str
    target_loss: float | None
    results: tuple[Result, ...]

    def to_json(self) -> str:
        """Everything, the courses of the losses too."""
        return json.dumps(_finite(asdict(self)), indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    """JSON has no nan."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
