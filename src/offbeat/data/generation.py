"""How the steps of one set of ranks divide the positions that were left when they began."""

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Annotated, NamedTuple

from offbeat.data.intervals import Intervals, count, cut
from offbeat.settings import at_least, check_settings

Whole = Annotated[int, at_least(0)]
Positive = Annotated[int, at_least(1)]


SLOWEST = 8  # times as long as the fastest rank: for slower ones the others wait


@dataclass(frozen=True)
class Layout:
    """What a step takes.

    Attributes:
        batch_size: samples of one batch of one rank, unless ranks have sizes of their own.
        accumulate: batches of one rank in a step.
        drop_last: whether less than a whole step for all ranks is left over.
        prefetch: batches that a rank draws ahead of the one that it trains on, at most.
        window: 0, or the steps of which slower ranks leave some out, so that all have equal batches
            and need the same time for as many steps.
    """

    batch_size: Positive
    accumulate: Positive = 1
    drop_last: bool = False
    prefetch: Whole = 0
    window: Whole = 0

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def lookahead(self) -> int:
        """Steps that a rank draws ahead of the one that it trains on, at most."""
        ahead = -(-self.prefetch // self.accumulate)
        # A rank that rests in a step knows it before another one joins at its beginning.
        return max(1, ahead * SLOWEST) if self.window else ahead

    @property
    def usual(self) -> int:
        """What ranks begin with: the size of a batch, or with ``window`` the steps of one."""
        return self.window or self.batch_size


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
    it cannot, as it has too few or is none, P - R batches repeat a sample. So no batch is empty or
    larger than its size. With ``drop_last`` R positions are left over.

    All ranks take part in every step, or with a ``window`` of H the rank with m of H steps in

    .. math:: \{s: \lceil (s + 1) m / H \rceil > \lceil s m / H \rceil\} \cup \{first\},

    in those whose number is a multiple of H among others, and one rank at least in each.
    """

    first: int
    ranks: tuple[int, ...]
    left: Intervals
    layout: Layout
    sizes: tuple[int, ...] = ()  # of a batch of each rank, or its steps of a window; () for usual

    @cached_property
    def size(self) -> int:
        """The number of positions."""
        return count(self.left)

    @cached_property
    def _each(self) -> tuple[int, ...]:
        return self.sizes or (self.layout.usual,) * len(self.ranks)

    def taking(self, step: int) -> tuple[int, ...]:
        """Return the ranks that take batches in a step."""
        if not self.layout.window or not self.sizes or step == self.first:
            return self.ranks
        pairs = zip(self.ranks, self.sizes, strict=True)
        return tuple(rank for rank, m in pairs if self._steps(m, step + 1) > self._steps(m, step))

    def made(self, steps: int) -> list[int]:
        """Return for each rank in how many of the first ``steps`` steps it takes batches."""
        if not self.layout.window or steps == 0:
            return [steps] * len(self.ranks)
        first = self.first
        return [1 + self._steps(m, first + steps) - self._steps(m, first + 1) for m in self._each]

    def _steps(self, m: int, step: int) -> int:
        return -(-step * m // self.layout.window)

    def _parts(self, step: int) -> int:
        """Return the number of batches of a step, those of all ranks."""
        return len(self.taking(step)) * self.layout.accumulate

    def edges(self, step: int) -> list[int]:
        """Return where the batches of a whole step begin and end."""
        if self.layout.window:
            return [
                *range(0, self._parts(step) * self.layout.batch_size + 1, self.layout.batch_size)
            ]
        return self._edges

    @cached_property
    def _edges(self) -> list[int]:
        each = (n for n in self._each for _ in range(self.layout.accumulate))
        return [*accumulate(each, initial=0)]

    def full(self, steps: int) -> int:
        """Return the positions of the first ``steps`` steps, if they are whole ones."""
        if self.layout.window:
            return sum(self.made(steps)) * self.layout.accumulate * self.layout.batch_size
        return steps * self._edges[-1]

    @cached_property
    def steps(self) -> int:
        """The number of steps until nothing is left."""
        steps = bisect_left(range(self.size + 1), self.size, key=self.full)
        return steps - (self.layout.drop_last and self.full(steps) > self.size)

    @cached_property
    def _lent(self) -> int:
        """The positions that the last step but one leaves to the last one."""
        last = self.steps - 1
        if last <= 0 or self.layout.drop_last:
            return 0
        parts, before = self._parts(self.first + last), self._parts(self.first + last - 1)
        missing = parts - (self.size - self.full(last))
        whole = self.full(last) - self.full(last - 1)
        return missing if missing > 0 and whole >= before + parts else 0

    def taken(self, steps: int) -> int:
        """Return how many positions the first ``steps`` steps take."""
        if steps >= self.steps:
            return self.full(self.steps) if self.layout.drop_last else self.size
        return self.full(steps) - (self._lent if steps == self.steps - 1 else 0)

    @property
    def end(self) -> int:
        """The first step for which nothing is left."""
        return self.first + self.steps

    def repeated(self, steps: int) -> int:
        """Return how many samples of the first ``steps`` steps repeat another."""
        if steps < self.steps or not self.steps:
            return 0
        last = self.taken(self.steps) - self.taken(self.steps - 1)
        return max(0, self._parts(self.end - 1) - last)

    def batches(self, step: int, rank: int) -> list[Batch]:
        """Return the batches of a rank in a step; none where nothing is left, or it rests."""
        begin, end = (self.taken(step - self.first + more) for more in (0, 1))
        ranks = self.taking(step) if end > begin else ()
        if rank not in ranks:
            return []
        own, edges = ranks.index(rank) * self.layout.accumulate, self.edges(step)
        parts = range(own, own + self.layout.accumulate)
        return [self._batch(begin, end - begin, part, edges) for part in parts]

    def _batch(self, begin: int, size: int, part: int, edges: list[int]) -> Batch:
        parts = len(edges) - 1
        if size < parts:
            where = begin + part % size
            return Batch(cut(self.left, where, where + 1), is_repeated=part >= size)
        # One for each, and of the rest in proportion.
        more, most = size - parts, max(1, edges[-1] - parts)
        low, high = (begin + k + (edges[k] - k) * more // most for k in (part, part + 1))
        return Batch(cut(self.left, low, high))
