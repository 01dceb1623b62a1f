"""The choice between algorithms while a run goes on: its figures, and the first that is fast."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

from offbeat.exchange import Algorithm
from offbeat.plan.fabric import Fabric
from offbeat.plan.predict import seconds_of_step
from offbeat.plan.profile import Profile
from offbeat.plan.stragglers import Stragglers

CLOSE = 1.05  # times the fastest step: methods within that are taken as equally fast
BACK = 1.02  # the same for one that is preferred to the present one, so that choices do not swing


@final
@dataclass(frozen=True)
class Figures:
    """What was measured of a run: ``profile`` of its usual rank, and the slowest one's excess."""

    profile: Profile
    fabric: Fabric
    slowest: float = 1.0

    def seconds(self, algorithm: Algorithm) -> float:
        """Predict the time of a step."""
        late = Stragglers(first_factor=self.slowest)
        return seconds_of_step(algorithm, self.profile, self.fabric, late)


def first_fast(seconds: Iterable[float], now: int = 0) -> int:
    """Return the first choice that is at most 1.05 times as slow as the fastest one.

    1.02 times for those before the present choice, number ``now``.

    >>> first_fast([1.04, 1.0, 2.0]), first_fast([1.04, 1.0, 2.0], now=1)
    (0, 1)
    """
    times = list(seconds)
    close = (min(times) * (BACK if index < now else CLOSE) for index in range(len(times)))
    return next(i for i, (each, most) in enumerate(zip(times, close, strict=True)) if each <= most)
