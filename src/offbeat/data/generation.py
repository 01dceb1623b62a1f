"""How the steps of one set of ranks divide the positions that were left when they began."""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Annotated, NamedTuple

from offbeat.data.intervals import Intervals, count, cut
from offbeat.settings import at_least, check_settings

Whole = Annotated[int, at_least(0)]
Positive = Annotated[int, at_least(1)]


@dataclass(frozen=True)
class Layout:
    """What a step takes.

    Attributes:
        batch_size: samples of one batch of one rank, unless ranks have sizes of their own.
        accumulate: batches of one rank in a step.
        drop_last: whether less than a whole step for all ranks is left over.
        prefetch: batches that a rank draws ahead of the one that it trains on, at most.
    """

    batch_size: Positive
    accumulate: Positive = 1
    drop_last: bool = False
    prefetch: Whole = 0

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def lookahead(self) -> int:
        """Steps that a rank draws ahead of the one that it trains on, at most."""
        return -(-self.prefetch // self.accumulate)


class Batch(NamedTuple):
    """The positions of one batch; whether they are another batch's, repeated, as none were left."""

    positions: Intervals
    is_repeated: bool = False


@dataclass(frozen=True)
class Generation:
    r"""Ranks that take batches from step ``first`` on out of ``left``, in its order.

    A step takes B positions, the sum of all batches: each rank takes ``accumulate`` batches of its
    own size, by default b. If R < B positions are left at the end, they are one more step if
    R >= P, the number of batches: each gets one, and of the rest a part in proportion to its size
    without that one, rounded up or down. If R < P, the step before leaves P - R of its own; where
    it cannot, with B < 2 P or as the only one, P - R batches repeat a sample. So all ranks make
    the same number of steps, and no batch is empty or larger than its size. With ``drop_last`` R
    positions are left over.
    """

    first: int
    ranks: tuple[int, ...]
    left: Intervals
    layout: Layout
    sizes: tuple[int, ...] = ()  # of a batch of each rank; () for b

    @cached_property
    def size(self) -> int:
        """The number of positions."""
        return count(self.left)

    @property
    def parts(self) -> int:
        """The batches of a step, those of all ranks."""
        return len(self.ranks) * self.layout.accumulate

    @cached_property
    def edges(self) -> list[int]:
        """Where the batches of a whole step begin and end."""
        each = self.sizes or (self.layout.batch_size,) * len(self.ranks)
        return [*accumulate((n for n in each for _ in range(self.layout.accumulate)), initial=0)]

    @property
    def full(self) -> int:
        """The positions of a whole step."""
        return self.edges[-1]

    @cached_property
    def steps(self) -> int:
        """The number of steps until nothing is left."""
        whole, rest = divmod(self.size, self.full)
        return whole + (rest > 0 and not self.layout.drop_last)

    def taken(self, steps: int) -> int:
        """Return how many positions the first ``steps`` steps take."""
        full = self.full
        if self.layout.drop_last:
            return min(steps, self.steps) * full
        if steps >= self.steps:
            return self.size
        is_before_last = 0 < steps == self.steps - 1 and full >= 2 * self.parts
        lends = is_before_last and 0 < self.size % full < self.parts
        return self.size - self.parts if lends else steps * full

    @property
    def end(self) -> int:
        """The first step for which nothing is left."""
        return self.first + self.steps

    def repeated(self, steps: int) -> int:
        """Return how many samples of the first ``steps`` steps repeat another."""
        last = self.size - self.taken(self.steps - 1) if steps >= self.steps > 0 else self.parts
        return max(0, self.parts - last)

    def batches(self, step: int, rank: int) -> list[Batch]:
        """Return the batches of a rank in a step; none where nothing is left."""
        begin, end = (self.taken(step - self.first + more) for more in (0, 1))
        own = self.ranks.index(rank) * self.layout.accumulate
        parts = range(own, own + self.layout.accumulate) if end > begin else ()
        return [self._batch(begin, end - begin, part) for part in parts]

    def _batch(self, begin: int, size: int, part: int) -> Batch:
        if size < self.parts:
            where = begin + part % size
            return Batch(cut(self.left, where, where + 1), is_repeated=part >= size)
        low, high = (begin + self._edge(part + more, size) for more in (0, 1))
        return Batch(cut(self.left, low, high))

    def _edge(self, part: int, size: int) -> int:
        """Return where a batch of a step of ``size`` positions begins."""
        more, most = size - self.parts, max(1, self.full - self.parts)
        return part + (self.edges[part] - part) * more // most
