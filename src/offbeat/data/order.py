"""The order of the samples of every epoch."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

import numpy as np

from offbeat.data.intervals import Intervals
from offbeat.data.permutation import epoch_key, permute
from offbeat.settings import at_least, between, check_settings

_key = lru_cache(maxsize=4)(epoch_key)


@dataclass(frozen=True)
class Order:
    """Which sample is at which position, of all epochs in a row.

    Position p of epoch e has the number e ``length`` + p.
    """

    length: Annotated[int, between(1, 2**62)]
    seed: Annotated[int, at_least(0)] = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        check_settings(self)

    def epoch(self, epoch: int) -> tuple[int, int]:
        """Return the positions of an epoch."""
        return epoch * self.length, (epoch + 1) * self.length

    def samples(self, intervals: Intervals) -> list[int]:
        """Return the samples at these positions; an interval is of one epoch.

        >>> Order(4, shuffle=False).samples(((6, 8), (8, 9)))
        [2, 3, 0]
        """
        return [sample for pair in intervals for sample in self._samples(*pair)]

    def _samples(self, low: int, high: int) -> list[int]:
        epoch, place = divmod(low, self.length)
        places = np.arange(place, place + high - low)
        if self.shuffle:
            places = permute(places, self.length, _key(self.seed, epoch))
        found: list[int] = places.tolist()
        return found
