"""The results of a comparison as plain data."""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal, final

from offbeat.compare.curves import LossCurves

State = Literal["done", "failed", "interrupted"]


@final
@dataclass(frozen=True)
class Spread:
    """Summarizes a quantity over rounds: median, minimum and maximum.

    >>> Spread.of([3.0, None, 1.0])
    Spread(median=2.0, min=1.0, max=3.0)
    """

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Spread | None":
        """Summarize the values that are not None; None if there are none or one is not finite."""
        known = [value for value in values if value is not None]
        if not known or not all(map(math.isfinite, known)):
            return None
        return cls(median(known), min(known), max(known))


@final
@dataclass(frozen=True)
class Setup:
    """The conditions that all methods have in common."""

    script: str
    arguments: tuple[str, ...]
    ranks_per_node: tuple[int, ...]
    rate: int | None  # bit/s that every node sends; None for no limit
    unshaped: str | None  # the reason why there is no limit; None if there is one
    started: str
    software: str
    links: str = "no rate limit"


@final
@dataclass(frozen=True)
class Result:
    """Holds the measurements of one method; unknown ones are None.

    :class:`~.measure.Measures` defines the quantities of a run. ``faster`` is the baseline's time
    per step divided by this method's. ``floor`` is a lower bound on the time of a step: the time
    of a step without communication, or the time that the step's bytes and their TCP headers take
    on the node's link, whichever is longer. ``share_of_floor`` is the floor divided by the
    measured time. Both ratios are computed within a round.
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
    speed_kept: Spread | None = None
    final_loss: Spread | None = None
    heldout_loss: Spread | None = None
    seconds_to_target: Spread | None = None
    consensus_distance: Spread | None = None
    course: LossCurves | None = None
    last_lines: tuple[str, ...] = ()  # of the rank that failed


@final
@dataclass(frozen=True)
class Comparison:
    """Holds the results of ``offbeat compare``: one :class:`Result` per method, in order."""

    setup: Setup
    steps: int | None
    rounds: int
    baseline: str
    target_loss: float | None
    results: tuple[Result, ...]

    def to_json(self) -> str:
        """Return all fields as JSON text; values that are not finite become null."""
        return json.dumps(_replace_nonfinite(asdict(self)), indent=2, allow_nan=False)


def _replace_nonfinite(value: Any) -> Any:
    """Replace floats that JSON cannot represent by None, in nested containers too."""
    if isinstance(value, dict):
        return {key: _replace_nonfinite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replace_nonfinite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
