"""One pass over samples: an epoch, or what was left of one when a run resumed."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any, NamedTuple

from offbeat.data.generation import Generation, Layout
from offbeat.data.intervals import Intervals, cut
from offbeat.data.log import Log
from offbeat.data.order import Order
from offbeat.data.plan import Plan, Start

KEPT = 1000  # steps; no method makes more between two exchanges


class Pass(NamedTuple):
    """What determines the batches of a pass, apart from the order of the samples.

    ``returned`` and ``repeated`` count samples of earlier passes; ``late`` returned too late for
    one, which was saved at its end. ``earlier`` are passes of the last ``KEPT`` steps, at least the
    one before: a rank may be lost before what it did there has committed. ``made`` counts the steps
    of the epoch before a run resumed.
    """

    epoch: int
    start: Start
    log: Log
    layout: Layout
    returned: int = 0
    repeated: int = 0
    late: Intervals = ()
    earlier: "tuple[Pass, ...]" = ()
    made: int = 0

    def plan(self, before: int = sys.maxsize) -> Plan:
        """Return the batches of all ranks and steps.

        ``before``: without the changes that were agreed on after as many steps, or more.
        """
        changes = [each for each in self.log.changes(self.start.step) if each.step < before]
        return Plan(self.layout, self.start, changes, self._given_earlier)

    def ended(self, step: int, before: int = sys.maxsize) -> "Pass":
        """Return what is left after ``step`` steps, as a pass from there on."""
        plan = self.plan(before)
        start, returned = plan.ended(step)
        return self._replace(
            start=start,
            returned=self.returned + returned,
            repeated=self.repeated + plan.repeated(step),
            earlier=self._kept(step),
        )

    def _kept(self, step: int) -> "tuple[Pass, ...]":
        pairs = pairwise((*self.earlier, self))
        kept = tuple(each for each, after in pairs if after.start.step > step - KEPT)
        return (*kept[-99:], self._replace(earlier=()))

    def _given_earlier(self, rank: int, since: int) -> Intervals:
        """Return what a rank was given in earlier passes, from a step on."""
        if not self.earlier:
            return ()
        *others, last = self.earlier
        return last._replace(earlier=tuple(others)).plan().given(rank, since, self.start.step)

    def then(self, epoch: int, step: int, more: Intervals) -> "Pass":
        """Return a pass over an epoch that begins after ``step`` steps, behind what is late.

        All ranks know the changes before ``step``, and maybe some of them a later one.
        """
        ended = self.ended(step, before=step)
        start = ended.start._replace(left=(*self.carried(ended), *more))
        return ended._replace(epoch=epoch, start=start, late=(), made=0)

    def begun_at(self, step: int, ranks: Sequence[int]) -> "Pass":
        """Return this one, of which no batch was drawn, as it begins after ``step`` steps."""
        members = self.log.members(ranks, step)
        return self._replace(start=Start(step, members, self.start.left))

    def resumed(self, begun: "Pass", keeps_sizes: bool) -> "Pass":
        """Return what is left of this one, which was loaded, as the pass that has begun."""
        steps, plan = begun.start.step, self.plan()
        ended = self.ended(steps)
        left = () if plan.is_over(steps) else ended.start.left
        keeps_sizes &= begun.start.ranks == ended.start.ranks
        sizes = ended.start.sizes if keeps_sizes else ()
        return begun._replace(
            start=begun.start._replace(left=left, sizes=sizes),
            returned=ended.returned,
            repeated=ended.repeated,
            late=self.carried(ended),
            earlier=ended.earlier,
            made=self.made + min(steps, plan.end) - self.start.step,
        )

    def carried(self, ended: "Pass") -> Intervals:
        """Return what returned too late for this pass; nothing if it was left before its end."""
        if not self.plan().is_over(ended.start.step):
            return ()
        start, ranks, left, sizes = ended.start
        rest = Generation(start, ranks, left, self.layout, sizes)
        return (*self.late, *cut(left, 0, rest.taken(rest.steps)))

    def saved(self, order: Order, step: int) -> dict[str, Any]:
        """Return plain values.

        The entries of the log are those of the replica itself: what is recorded until the state
        is written belongs to it. Loaders keep a state from the moment at which they drew a batch,
        which is steps before it was trained on.
        """
        return {"order": asdict(order), "step": step, **self._saved()}

    def _saved(self) -> dict[str, Any]:
        return {
            "layout": asdict(self.layout),
            "epoch": self.epoch,
            "start": [
                self.start.step,
                [*self.start.ranks],
                _lists(self.start.left),
                [*self.start.sizes],
            ],
            "log": [*self.log],
            "counts": [self.returned, self.repeated, self.made],
            "late": _lists(self.late),
            "earlier": [each._saved() for each in self.earlier],
        }

    @staticmethod
    def read(state: object, order: Order) -> tuple["Pass", int]:
        """Return what :meth:`saved` has saved, and the step; ``ValueError`` if it does not fit."""
        if not isinstance(state, Mapping) or not {"order", "step", "start"} <= {*state}:
            raise ValueError(
                f"cannot load {ascii(state)[:60]}; pass what ElasticSampler.state_dict() returned"
            )
        for name, ours in asdict(order).items():
            if (saved := state["order"][name]) != ours:
                raise ValueError(
                    f"the state is of a sampler with {name}={saved}, this one has {name}={ours}; "
                    "use the same data set and settings, or begin without the state"
                )
        return Pass._read(state), state["step"]

    @staticmethod
    def _read(state: Mapping[str, Any]) -> "Pass":
        step, ranks, left, sizes = state["start"]
        lost, joined, known, resized = state["log"]
        returned, repeated, *made = state["counts"]
        return Pass(
            state["epoch"],
            Start(step, tuple(ranks), _pairs(left), tuple(sizes)),
            Log(lost, joined, tuple(known), resized),
            Layout(**state["layout"]),
            returned,
            repeated,
            _pairs(state["late"]),
            tuple(map(Pass._read, state["earlier"])),
            *made,
        )


def _lists(intervals: Intervals) -> list[list[int]]:
    return [[*pair] for pair in intervals]


def _pairs(values: Sequence[Sequence[int]]) -> Intervals:
    return tuple((low, high) for low, high in values)
