r"""Which positions a rank takes in a step: a function of the history of the members alone.

The samples of an epoch are in a random order; a position is a place in it. A pass starts with the
positions R_0 and the ranks M_0, and each change of the members begins a generation g:

1. Within g, step s takes the next B positions of R_g, the size of its batch for each rank in order,
   of those that do not rest in this step.
2. A change that is agreed on after k steps begins one at s_g = k + 1 + L. A rank draws at most L
   steps ahead, so nobody has drawn step s_g by then, and what was drawn before it stays valid.
3. A rank that joins takes its batches of the steps before s_g from R_{g-1}, behind M_{g-1}.
4. What a lost rank was given in the steps u..s_g - 1 returns, where u is the first step that did
   not commit with it: R_g = (what returns), then the rest of R_{g-1}.
5. So each position is at every moment in R_g or in exactly one batch that counts.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from offbeat.data.generation import Batch, Generation, Layout
from offbeat.data.intervals import Intervals, count, cut, without

Given = Callable[[int, int], Intervals]  # (rank, step)


class Start(NamedTuple):
    """Where a pass starts: ``step`` steps are done, ``ranks`` take part, ``left`` is to be used.

    ``sizes``: of each rank, as :class:`Generation` has them; () where all have that of the layout.
    """

    step: int
    ranks: tuple[int, ...]
    left: Intervals
    sizes: tuple[int, ...] = ()


class Change(NamedTuple):
    """A change of the members or of their sizes, agreed on when ``step`` steps were done.

    Attributes:
        step: no rank has done more steps when it hears of the change.
        lost: by rank that is lost or has left, the first step whose samples do not count.
        joined: by rank that has joined, its first step with a batch.
        sizes: by rank, the size of its batches, or its steps of a window, from then on; those of
            others stay as they are, and a rank that joins begins with what the layout says. In a
            window all begin anew with every step where a rank is lost or joins.
    """

    step: int
    lost: Mapping[int, int] = {}
    joined: Mapping[int, int] = {}
    sizes: Mapping[int, int] = {}


class Plan:
    """The batches of all ranks and steps from a start on.

    Ranks 0 and 1 take batches of two. When 1 step was done, rank 1 was lost with the batch that it
    had begun, and rank 0 takes it, after those that it has drawn:

    >>> plan = Plan(Layout(batch_size=2), Start(0, (0, 1), ((0, 10),)), [Change(1, lost={1: 1})])
    >>> [[batch.positions for batch in plan.batches(step, 0)] for step in range(5)]
    [[((0, 2),)], [((4, 6),)], [((6, 8),)], [((8, 10),)], []]

    ``earlier``: returns what a rank was given in the steps of earlier passes from one step on.
    """

    def __init__(
        self,
        layout: Layout,
        start: Start,
        changes: Sequence[Change],
        earlier: Given = lambda *_: (),
    ) -> None:
        """Compute the generations; ``changes`` by step."""
        first, ranks, left, sizes = start
        self.generations = [Generation(first, ranks, left, layout, sizes)]
        self._earlier, self._returned, self._changes = earlier, [0], list[Change]()
        self._end = sys.maxsize  # the first step with nothing left; later generations take nothing
        self._early: dict[tuple[int, int], list[Batch]] = {}  # of ranks that joined, by step, rank
        for change in changes:
            self._begin(change.step + 1 + layout.lookahead, change)

    @property
    def latest(self) -> Generation:
        """The last generation."""
        return self.generations[-1]

    @property
    def end(self) -> int:
        """The first step for which nothing is left, if no further change comes."""
        return min(self._end, self.latest.end)

    def is_over(self, step: int) -> bool:
        """Return whether nothing is left for a step."""
        return step >= min(self._end, self.at(step).end)

    def at(self, step: int) -> Generation:
        """Return the generation of a step."""
        return next(each for each in reversed(self.generations) if each.first <= step)

    def batches(self, step: int, rank: int) -> list[Batch]:
        """Return the batches of a rank in a step, ``accumulate`` ones or, at the end, none."""
        if step >= self._end:
            return []
        if (step, rank) in self._early:
            return self._early[step, rank]
        generation = self.at(step)
        return generation.batches(step, rank) if rank in generation.ranks else []

    def rests(self, step: int, rank: int) -> bool:
        """Return whether a rank takes no batch in a step, in which others do."""
        return not self.is_over(step) and not self.batches(step, rank)

    def repeated(self, step: int) -> int:
        """Return how many samples all ranks have repeated before a step, as too few were left."""
        ends = [min(each.first, step) for each in self.generations[1:]] + [step]
        pairs = zip(self.generations, ends, strict=True)
        early = [batches for (when, _), batches in self._early.items() if when < step]
        return sum(each.repeated(min(end, self._end) - each.first) for each, end in pairs) + sum(
            count(batch.positions) for batches in early for batch in batches if batch.is_repeated
        )

    def ended(self, step: int) -> tuple[Start, int]:
        """Return where a pass starts that begins at ``step``, and how many positions returned.

        All changes have begun by then: what ranks have drawn for later steps is dropped.
        """
        begun = sum(each.first <= step for each in self.generations)
        generation, pending = self.generations[begun - 1], self._changes[begun - 1 :]
        offset = generation.taken(max(0, min(step, self._end) - generation.first))
        lost = {rank: since for change in pending for rank, since in change.lost.items()}
        joined = {rank: since for change in pending for rank, since in change.joined.items()}
        early = [
            (when < lost.get(rank, step), pair)
            for when, rank in self._early
            if joined.get(rank, step) <= when < step
            for pair in self._positions(when, rank)
        ]
        kept = [pair for counts, pair in early if counts]
        returned: Intervals = ()
        for rank, since in sorted(lost.items()):
            returned += without(self.given(rank, since, step), (*kept, *returned))
        left = cut(generation.left, offset, generation.size)
        left = returned + without(left, (pair for _, pair in early))
        start = Start(step, self.latest.ranks, left, self.latest.sizes)
        return start, sum(self._returned[:begun]) + count(returned)

    def _begin(self, first: int, change: Change) -> None:
        before = self.latest
        self._end = min(self._end, before.end if before.end < first else self._end)
        until = min(first, self._end)
        offset = before.taken(max(0, until - before.first))
        joined = {rank: k for rank, k in change.joined.items() if rank not in before.ranks}
        for rank, since in sorted(joined.items()):
            for step in range(max(since, self.generations[0].first), until):
                offset += self._take_early(step, rank, offset)
        ranks, left = (*before.ranks, *joined), cut(before.left, offset, before.size)
        lost = {rank: k for rank, k in sorted(change.lost.items()) if rank in ranks}
        returned = [each for rank, k in lost.items() for each in self.given(rank, k, until)]
        self._changes.append(Change(change.step, lost, joined))  # of those that it concerns
        self._returned.append(count(returned))
        members = tuple(sorted(set(ranks) - set(lost)))
        place = first, members, (*returned, *left), before.layout
        self.generations.append(Generation(*place, self._sizes(members, change.sizes)))

    def _sizes(self, members: Sequence[int], changed: Mapping[int, int]) -> tuple[int, ...]:
        before, usual = self.latest, self.latest.layout.usual
        known = dict(zip(before.ranks, before.sizes, strict=bool(before.sizes))) | {**changed}
        sizes = tuple(known.get(rank, usual) for rank in members)
        if before.layout.window and (members != before.ranks or max(sizes) < usual):
            return ()  # the rank that takes part in every step is gone, or may not know that it is
        return () if set(sizes) == {usual} else sizes

    def _take_early(self, step: int, rank: int, offset: int) -> int:
        """Give a rank that joins its batches of a step, and return how many positions it takes."""
        before, layout = self.latest, self.latest.layout
        wanted = layout.batch_size * layout.accumulate
        size = min(wanted, before.size - offset)
        if size < (wanted if layout.drop_last else layout.accumulate):
            others = self.batches(step, self.at(step).taking(step)[0])
            self._early[step, rank] = [Batch(each.positions, is_repeated=True) for each in others]
            return 0
        edges = [offset + part * size // layout.accumulate for part in range(layout.accumulate + 1)]
        self._early[step, rank] = [Batch(cut(before.left, *edge)) for edge in pairwise(edges)]
        return size

    def given(self, rank: int, since: int, until: int) -> Intervals:
        """Return what a rank was given in the steps from ``since`` on, in their order."""
        start = self.generations[0].first
        before = self._earlier(rank, since) if since < start else ()
        steps = range(max(since, start), until)
        return before + tuple(pair for step in steps for pair in self._positions(step, rank))

    def _positions(self, step: int, rank: int) -> Intervals:
        batches = self.batches(step, rank)
        return tuple(pair for each in batches if not each.is_repeated for pair in each.positions)
