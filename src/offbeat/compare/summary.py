"""The summary of all runs: medians over rounds, and quantities relative to other methods."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from offbeat.compare.curves import merge_curves
from offbeat.compare.experiment import Experiment, Method
from offbeat.compare.measure import Measures
from offbeat.compare.result import Comparison, Result, Setup, Spread, State
from offbeat.compare.run import Run
from offbeat.lab.check import PAYLOAD

Measured = tuple[Run, Measures]


def summarize(experiment: Experiment, setup: Setup, runs: Sequence[Run]) -> Comparison:
    """Summarize the recordings of all runs; methods without a run are left out.

    Failed runs are not counted. An interrupted run counts for time and bytes if its method has no
    complete run, but never for losses.
    """
    complete = {run.method for run in runs if run.code == 0}
    kept = [r for r in runs if r.code == 0 or (r.code is None and r.method not in complete)]
    measured = [(run, found) for run in kept if (found := run.measures)]
    target = experiment.target_loss
    if target is None:
        target = _default_target(measured)
    summarizer = _Summarizer(experiment.baseline, setup.rate, target, runs, measured)
    begun = [method for method in experiment.methods if any(run.method == method for run in runs)]
    return Comparison(
        setup=setup,
        steps=max((found.steps for _, found in measured), default=experiment.steps),
        rounds=max((run.round for run in runs), default=0),
        baseline=experiment.baseline.text,
        target_loss=target,
        results=tuple(summarizer.result(method) for method in begun),
    )


@final
@dataclass(frozen=True)
class _Summarizer:
    """Builds the results from the measurements of all methods."""

    baseline: Method
    rate: int | None
    target: float | None
    runs: Sequence[Run]
    measured: Sequence[Measured]

    def result(self, method: Method) -> Result:
        """Return the result of one method."""
        own = [run for run in self.runs if run.method == method]
        mine = [each for each in self.measured if each[0].method == method]
        timed = [found for _, found in mine]
        ends = [found for run, found in mine if run.code == 0]
        floor, share = self._floor(method, mine)
        return Result(
            name=method.text,
            state=_state(own),
            note=_note(own, ends),
            is_baseline=method == self.baseline,
            is_floor=method.is_floor,
            rounds=len(timed),
            seconds_per_step=Spread.of(m.seconds for m in timed),
            faster=self._speedup(method),
            floor=floor,
            share_of_floor=share,
            bytes_per_step=Spread.of(m.bytes_sent for m in timed),
            stall_per_step=Spread.of(m.stall for m in timed) if method.knows_stall else None,
            speed_kept=Spread.of(m.speed_kept for m in timed) if method.knows_stall else None,
            final_loss=Spread.of(m.final_loss for m in ends),
            heldout_loss=Spread.of(m.heldout_loss for m in ends),
            seconds_to_target=self._seconds_to_target(ends),
            consensus_distance=Spread.of(m.distance for m in ends),
            course=merge_curves([m.curve for m in ends]) if ends else None,
            last_lines=tuple(line for run in own if run.failure for line in run.last_lines),
        )

    def _floor(
        self, method: Method, mine: Sequence[Measured]
    ) -> tuple[Spread | None, Spread | None]:
        """Return the floor, and the floor divided by the measured time of the same round."""
        alone = {run.round: m.seconds for run, m in self.measured if run.method.is_floor}
        both = [(run, m) for run, m in mine if run.round in alone and not method.is_floor]
        floors = [max(alone[run.round], self._link_seconds(m)) for run, m in both]
        shares = [floor / m.seconds for floor, (_, m) in zip(floors, both, strict=True)]
        return Spread.of(floors), Spread.of(shares)

    def _link_seconds(self, measures: Measures) -> float:
        return 0.0 if self.rate is None else 8 * measures.bytes_on_link / (self.rate * PAYLOAD)

    def _speedup(self, method: Method) -> Spread | None:
        """Return the baseline's time over the method's; within rounds, as machine speed varies."""
        seconds = {(run.method, run.round): m.seconds for run, m in self.measured}
        rounds = sorted({number for _, number in seconds})
        pairs = [(seconds.get((self.baseline, n)), seconds.get((method, n))) for n in rounds]
        return Spread.of(theirs / mine for theirs, mine in pairs if theirs and mine)

    def _seconds_to_target(self, ends: Sequence[Measures]) -> Spread | None:
        """Return the time to the target loss; None if one of the runs did not reach it."""
        if self.target is None:
            return None
        seconds = [m.curve.seconds_to(self.target) for m in ends]
        return None if None in seconds else Spread.of(seconds)


def _default_target(measured: Sequence[Measured]) -> float | None:
    """Return the highest final loss of all complete runs, which every method reaches.

    Methods without communication are excluded if there are others.
    """
    complete = [each for each in measured if each[0].code == 0]
    methods = [each for each in complete if not each[0].method.is_floor] or complete
    losses = [found.final_loss for _, found in methods if found.final_loss is not None]
    return max(filter(math.isfinite, losses), default=None)


def _state(runs: Sequence[Run]) -> State:
    if any(run.failure for run in runs):
        return "failed"
    return "interrupted" if any(run.code is None for run in runs) else "done"


def _note(runs: Sequence[Run], complete: Sequence[Measures]) -> str | None:
    failures = [f"failed: {run.failure}" for run in runs if run.failure]
    stopped = [f"interrupted in round {run.round}" for run in runs if run.code is None]
    losses = [m.final_loss for m in complete if m.final_loss is not None]
    diverged = [] if all(map(math.isfinite, losses)) else ["the loss is not finite"]
    return "; ".join(failures + stopped + diverged) or None
