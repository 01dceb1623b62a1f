"""The measurements of one run, computed from the recordings of its ranks."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import final

from offbeat.telemetry.recording import Recording, Step, mean_loss

MAX_WARM_UP = 10


@final
@dataclass(frozen=True)
class LossCurve:
    """The losses of a run. ``loss[k]`` and ``seconds[k]`` belong to step k + 1.

    ``seconds`` is the training time since the start of the first step, without evaluations.
    Losses are means over the ranks that reported one.
    """

    seconds: tuple[float, ...]
    loss: tuple[float | None, ...]
    heldout: tuple[tuple[int, float], ...] = ()  # (steps before the evaluation, loss)

    @cached_property
    def smooth(self) -> list[float | None]:
        """The moving average of the loss over a trailing window of a tenth of the run.

        Where the window has no loss, the previous value is repeated.
        """
        window = self._window
        smooth: list[float | None] = []
        for k in range(len(self.loss)):
            known = [x for x in self.loss[max(0, k + 1 - window) : k + 1] if x is not None]
            smooth.append(fmean(known) if known else smooth[-1] if smooth else None)
        return smooth

    def seconds_to(self, target: float) -> float | None:
        """Return the first time at which the smooth loss is at most ``target``; None if never.

        Not before the window is full: the mean of the first few batches says little.
        """
        pairs = list(zip(self.seconds, self.smooth, strict=True))[self._window - 1 :]
        return next((s for s, x in pairs if x is not None and x <= target), None)

    @property
    def _window(self) -> int:
        return max(1, math.ceil(len(self.loss) / 10))


@final
@dataclass(frozen=True)
class Measures:
    """The measurements of one run. Quantities per step are means over the steps after warm-up.

    ``seconds`` is the time per step of the slowest rank. ``bytes_sent`` is the sum over the ranks
    of one node of the bytes sent on the axes "world" and "node", for the node that sends most;
    collectives count what their ring sends. ``bytes_on_link`` is the part of it that must leave
    the node: of a ring through all L ranks of a node, one hop in L. ``stall`` is the time in
    seconds that the training loop waited for other ranks, averaged over ranks. ``speed_kept`` is
    what all ranks train on in a second, relative to the sum of what each one would without waits,
    in samples where steps have weights, else in steps. ``distance`` is the mean Euclidean distance
    of the replicas from their average, just before ``finish()``.
    """

    steps: int
    seconds: float
    bytes_sent: float
    bytes_on_link: float
    stall: float
    speed_kept: float | None
    final_loss: float | None
    heldout_loss: float | None
    distance: float | None
    curve: LossCurve


def warm_up(steps: int) -> int:
    """Return the number of warm-up steps: a fifth of ``steps``, at most 10, at least 1 of 2.

    >>> [warm_up(steps) for steps in (1, 2, 20, 60, 1000)]
    [0, 1, 4, 10, 10]
    """
    return min(MAX_WARM_UP, math.ceil(steps / 5), steps - 1)


def measure_run(recordings: Sequence[Recording]) -> Measures:
    """Compute the measurements of a run with at least one step on every rank.

    Only the steps that all ranks have completed are counted.
    """
    steps = min(len(recording.steps) for recording in recordings)
    trained = {r.rank: r.steps[:steps] for r in recordings}
    counted = {rank: mine[warm_up(steps) :] for rank, mine in trained.items()}
    nodes = recordings[0].nodes
    curve = _curve(list(trained.values()), recordings)
    return Measures(
        steps=steps,
        seconds=max(fmean(s.seconds + s.choosing for s in mine) for mine in counted.values()),
        bytes_sent=_busiest(counted, nodes, share=False),
        bytes_on_link=_busiest(counted, nodes, share=True),
        stall=fmean(step.seconds_stalled for mine in counted.values() for step in mine),
        speed_kept=_speed_kept([*counted.values()]),
        final_loss=curve.smooth[-1],
        heldout_loss=curve.heldout[-1][1] if curve.heldout else None,
        distance=next((r.distance for r in recordings if r.distance is not None), None),
        curve=curve,
    )


def _busiest(
    counted: Mapping[int, Sequence[Step]], nodes: Sequence[Sequence[int]], share: bool
) -> float:
    """Return bytes per step of the busiest node; with ``share``, those that must leave it."""

    def sent(rank: int, weight: float) -> float:
        steps = [step.bytes_sent for step in counted[rank]]
        return fmean(by.get("world", 0) * weight + by.get("node", 0) for by in steps)

    weights = [1 / len(ranks) if share else 1.0 for ranks in nodes]
    return max(
        sum(sent(rank, weight) for rank in ranks)
        for ranks, weight in zip(nodes, weights, strict=True)
    )


def _speed_kept(ranks: Sequence[Sequence[Step]]) -> float | None:
    r"""Return :math:`\sum_r W_r / \max_r T_r` over :math:`\sum_r W_r / (T_r - S_r)`.

    W is the weight of all steps of a rank, T their time, and S the waits in it. None without times.
    """
    weights = [sum(step.weight for step in mine) for mine in ranks]
    whole = [sum(step.seconds + step.choosing for step in mine) for mine in ranks]
    own = [sum(step.seconds - step.seconds_stalled for step in mine) for mine in ranks]
    if min(own) <= 0 or not any(weights):
        return None
    speeds = sum(weight / time for weight, time in zip(weights, own, strict=True))
    return sum(weights) / max(whole) / speeds


def _curve(ranks: Sequence[Sequence[Step]], recordings: Sequence[Recording]) -> LossCurve:
    seconds, loss, clock = [], [], 0.0
    for steps in zip(*ranks, strict=True):
        clock += fmean(step.seconds + step.choosing for step in steps)
        seconds.append(clock)
        loss.append(mean_loss(steps))
    heldout: dict[int, list[float]] = {}
    for recording in recordings:
        # Of two evaluations after the same step the later one counts: it follows finish().
        for after, value in dict(recording.heldout).items():
            heldout.setdefault(min(after, len(seconds)), []).append(value)
    points = tuple((after, fmean(values)) for after, values in sorted(heldout.items()))
    return LossCurve(tuple(seconds), tuple(loss), points)
