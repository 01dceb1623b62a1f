"""The choice of the method by the run itself: what is measured, and what follows from it."""

import logging
import math
import time
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any, final

import torch

from offbeat.elastic.generation import Generation
from offbeat.exchange import Algorithm
from offbeat.kit import quantity
from offbeat.lab.check import PAYLOAD
from offbeat.plan.choose import Figures, first_fast
from offbeat.plan.fabric import Fabric
from offbeat.plan.profile import Parameter, Profile
from offbeat.plan.speeds import Speeds
from offbeat.recipes import algorithm as parsed
from offbeat.replica.switching.agreement import switch_fault
from offbeat.replica.switching.waits import Waits
from offbeat.telemetry.recorder import Recorder
from offbeat.transport.group import Group, message_device
from offbeat.transport.messages import exchange

FIRST, EVERY = 5, 10  # steps until the first decision, and between later ones at least
SHARE = 0.02  # of the time of a run that later decisions take at most
LEAST, MOST = 2**14, 2**18  # values of a message that measures the rate
TRIES = 2
LEAST_SHARE = 0.1  # of a long message that its bytes take: less is not told from a pause
WARM_UP = 2  # steps that are not counted: they measure orders and compile
KEPT = 20  # decisions in stats()

_log = logging.getLogger("offbeat")


@final
class Autopilot:
    """Measures the steps of a rank and the links, and chooses among the candidates."""

    def __init__(self, members: Generation, recorder: Recorder) -> None:
        self._members, self._recorder = members, recorder
        # Of each step: forward, backward, the rest of computing, and waiting.
        self._times: list[tuple[float, float, float, float]] = []
        self.decisions: list[dict[str, Any]] = []
        self._copied = 0.0  # bytes per second, of a pass over memory
        # The last step, how many ranks have joined, and the next step to be followed by a decision.
        self._step, self._joined, self._next = members.steps, 0, FIRST
        self.waits = Waits()  # compared between decisions
        self._measured = 0.0  # when the measurement began
        assert members.algorithm.auto is not None, "an algorithm that chooses"
        self._auto = members.algorithm.auto
        self.candidates = [parsed(text) for text in self._auto.candidates]

    def require_candidates(self) -> None:
        """Raise ``ValueError`` for candidates that cannot be run."""
        for candidate in self.candidates:
            schedule = "the time of a schedule cannot be predicted; list its algorithms"
            is_one = candidate.then is not None
            if fault := schedule if is_one else switch_fault(self._members, candidate):
                raise ValueError(f"auto() cannot choose {candidate}: {fault}")

    def is_due(self, steps: int) -> bool:
        """Count the step that has ended; return whether ``steps`` are followed by a decision.

        Or by a comparison of waits.
        """
        last, (forward, backward) = self._recorder.last, self._recorder.computed
        rest = max(0.0, last["seconds"] - last["seconds_stalled"] - forward - backward)
        self._times.append((forward, backward, rest, last["seconds_stalled"]))
        self.waits.add(last["seconds_stalled"], forward + backward + rest)
        # Ranks that join know of no decision, nor do any after a state has been loaded.
        joins = len(self._members.joined)
        if joins != self._joined or steps != self._step + 1:
            self._joined, self._next = joins, steps - 1 + FIRST
            self.waits.begin(steps, None)
        self._step = steps
        return steps >= min(self._next, self.waits.due)

    @property
    def decides(self) -> bool:
        """Whether a decision is due, rather than a comparison of waits."""
        return self._step >= self._next

    def measure(self) -> dict[str, Any]:
        """Return the figures of this rank since the last decision; all ranks call."""
        self._measured = time.perf_counter()
        counted = self._times[WARM_UP:] or self._times
        control, model = self._members.connection.control, self._members.filler.model
        numel = sum(parameter.numel() for parameter in model.trained.values())
        # Medians: a step that loads data, or evaluates, is not what a method changes.
        *times, _ = [median(column) for column in zip(*counted, strict=True)]
        stalled = fmean(each[-1] for each in counted)
        latency, rate = (0.0, 1e12) if control is None else _measure_link(control, numel // 2)
        self._copied = self._copied or _copy_rate()
        return {
            "times": times,
            "stalled": stalled,
            "latency": latency,
            "rate": rate,
            "leaves": self._leaves_node,
            "copied": self._copied,
        }

    def choose(self, said: Sequence[dict[str, Any]], steps: int) -> dict[str, Any]:
        """Decide from the figures of all ranks."""
        figures, candidates = self._figures(said), self.candidates
        seconds = [_predicted(figures, candidate) for candidate in candidates]
        now = self._members.algorithm
        slots = [(c.gradients, c.parameters) for c in candidates]
        here = now.gradients, now.parameters
        present = slots.index(here) if here in slots else 0
        chosen = first_fast(seconds, present)
        fabric, cost = figures.fabric, time.perf_counter() - self._measured
        step = max(seconds[chosen], 1e-9)
        # Over whole rounds of its exchanges: a step with one waits for longer than others.
        turn = getattr(candidates[chosen].parameters, "every", 1)
        is_in_vain = steps < self._next and chosen == present  # waits vary for other reasons
        return {
            "step": steps,
            "next": steps + max(EVERY, math.ceil(cost / SHARE / step)),
            "compare": None if is_in_vain else math.ceil(EVERY / turn) * turn,
            "cost": cost,
            "chosen": chosen,
            "algorithm": str(candidates[chosen]),
            "compute": figures.profile.compute,
            "slowest": figures.slowest,
            "stalled": median(each["stalled"] for each in said),
            "rate": fabric.rate,
            "latency": fabric.latency,
            "seconds": {str(c): s for c, s in zip(candidates, seconds, strict=True)},
        }

    def adopt(self, decision: dict[str, Any]) -> Algorithm:
        """Note the decision of all ranks, and return the algorithm."""
        chosen: Algorithm = self.candidates[decision["chosen"]]
        self.decisions = [*self.decisions[1 - KEPT :], decision]
        self._recorder.decided(decision)
        self._next, self._times = decision["next"], []  # now: after a loss all measure again
        self.waits.begin(decision["step"], decision["compare"])
        if self._members.world.rank == self._members.world.ranks[0]:
            _log.info("%s", _line(decision))
        now, chosen = self._members.algorithm, chosen.chosen_by(self._auto)
        return chosen if now.then is None else chosen.until(now.end, now.then)

    def _figures(self, said: Sequence[dict[str, Any]]) -> Figures:
        compute = [sum(each["times"]) for each in said]
        forward, backward, rest = map(median, zip(*(each["times"] for each in said), strict=True))
        copied, leaves = median(each["copied"] for each in said), any(e["leaves"] for e in said)
        rate, latency = (
            median(each[figure] for each in said if each["leaves"] or not leaves)
            for figure in ("rate", "latency")
        )
        parameters = [
            Parameter(name, p.numel(), str(p.dtype).removeprefix("torch."))
            for name, p in self._members.filler.model.trained.items()
        ]
        nodes = self._members.world.nodes
        fabric = Fabric(
            nodes=len(nodes), ranks_per_node=max(map(len, nodes)), rate=rate, latency=latency
        )
        speeds = Speeds.of_bandwidth(copied)
        profile = Profile.by_size(parameters, forward, backward, rest, speeds)
        return Figures(profile, fabric, max(1.0, max(compute) / max(median(compute), 1e-9)))

    @property
    def _leaves_node(self) -> bool:
        """Whether the next rank, to which this one sends, is on another node."""
        control, world = self._members.connection.control, self._members.world
        if control is None:
            return False
        after = control.ranks[(control.rank + 1) % control.size]
        return after not in world.nodes[world.node]


def _measure_link(group: Group, numel: int) -> tuple[float, float]:
    """Return seconds of a message without bytes, and the bits per second of a link.

    From messages of one and of many values, of each rank to the next one, each of which waits for
    the word of its receiver. The fastest of each counts: other load, and windows of TCP that have
    not grown yet, only add time.
    """
    many = min(max(numel, LEAST), MOST)
    few, all_of = _seconds(group, 1), _seconds(group, many)
    passing = max(all_of - few, LEAST_SHARE * all_of)
    return few / 2, 8 * 4 * (many - 1) / passing / PAYLOAD


def _seconds(group: Group, numel: int) -> float:
    device, size = message_device(group), group.size
    sent, received = torch.zeros(2, numel, dtype=torch.float32, device=device)
    after, before = (group.rank + 1) % size, (group.rank - 1) % size
    times = []
    for _ in range(1 + TRIES):  # without a pause, in which tokens of a shaped link would gather
        started = time.perf_counter()
        exchange([(after, sent)], [(before, received)], group).wait()
        times.append(time.perf_counter() - started)
    return min(times[1:])  # no rank is late any more


def _copy_rate() -> float:
    source = torch.zeros(2**22)
    target, times = torch.empty_like(source), []
    for _ in range(TRIES):
        started = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - started)
    return 2 * source.nbytes / min(times)


def _predicted(figures: Figures, candidate: Algorithm) -> float:
    try:
        return figures.seconds(candidate)
    except ValueError:  # it cannot run on these nodes
        return math.inf


def _line(decision: dict[str, Any]) -> str:
    times = ", ".join(f"{n} {quantity.seconds(s)}" for n, s in decision["seconds"].items())
    compute, stalled, latency, cost = (
        quantity.seconds(decision[name]) for name in ("compute", "stalled", "latency", "cost")
    )
    rate = quantity.rate(int(float(f"{decision['rate']:.2g}")))
    return (
        f"step {decision['step']}: {decision['algorithm']}, at {rate} and {latency} a message; "
        f"computing {compute} (the slowest {decision['slowest']:.2f} times), waiting {stalled}; "
        f"predicted: {times}; measured in {cost}, again after step {decision['next']}"
    )
