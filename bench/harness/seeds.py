"""The engine of accuracy over seeds: many workers train a small net, and each is evaluated.

Workers are threads of this process, which exchange as ranks do (:func:`in_threads`), or real
processes on emulated nodes (:func:`in_lab`), which alone tell how long a step takes. Small nets
with plain methods also train as rows of one tensor, dozens of workers in seconds
(:mod:`bench.harness.rows`).
"""

import copy
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import offbeat
from bench.harness.case import Case, Data, Outcome
from bench.harness.claim import Effect
from bench.harness.files import console
from bench.harness.ranks import on_nodes
from offbeat.testing import ThreadWorld

Hook = Callable[[offbeat.Replica, int], Any]  # of a worker and its step
WARM_UP = 10  # steps whose time does not count


class Runs(dict[str, list[float]]):
    """The scores of a method by name, one for each seed."""

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> "Runs":
        return cls({name: [run.scores[name] for run in outcomes] for name in outcomes[0].scores})

    @property
    def mean(self) -> float:
        """Of the held-out scores."""
        return fmean(self["heldout"])

    def over(self, other: "Runs", name: str = "heldout") -> Effect:
        """By how much scores are above another method's, seed by seed."""
        return Effect.between(self[name], other[name])

    def change(self, other: "Runs") -> Effect:
        """By how many % held-out scores differ from another method's, seed by seed."""
        pairs = zip(self["heldout"], other["heldout"], strict=True)
        return Effect.mean([100 * (ours / theirs - 1) for ours, theirs in pairs])

    def __format__(self, form: str) -> str:
        """Mean and standard deviation of the held-out scores, or by default those in %."""
        if not form:
            return f"{self:.1f}%"
        deviation = f" ± {stdev(self['heldout']):{form}}" if len(self["heldout"]) > 1 else ""
        return f"{self.mean:{form}}{deviation}"

    def __str__(self) -> str:
        return f"{self}"


def over_seeds(train: Callable[[Case], Outcome], case: Case, seeds: int) -> Runs:
    """Train with each seed. Runs of one seed have the same start and see the same samples."""
    return Runs.of([train(replace(case, seed=seed)) for seed in range(seeds)])


def nothing(replica: offbeat.Replica, step: int) -> None:
    """What follows a step unless something is to be looked at."""


def work(
    case: Case,
    start: nn.Module,
    data: Data,
    mesh: offbeat.World | None = None,
    before: Hook = nothing,
    after: Hook = nothing,
) -> Outcome:
    """One worker; the hooks come between the optimizer and the exchange, and after both.

    What they return is kept. The latter ends the run early by True, on all workers alike.
    """
    model, task, ((x, y), scored) = copy.deepcopy(start), case.task, data
    optimizer = task.optimizer(model.parameters())
    replica = offbeat.replicate(model, case.algorithm, mesh=mesh, optimizer=optimizer)
    random = torch.Generator().manual_seed(1000 * case.seed + replica.world.rank)
    ends, losses, seen = [], [], []
    for step in range(case.steps):
        optimizer.param_groups[0]["lr"] = case.lr(step)
        chosen = torch.randint(len(x), (task.batch,), generator=random)
        optimizer.zero_grad()
        loss = task.loss(model(x[chosen]), y[chosen])
        if case.pause is not None:
            case.pause.sleep(random)
        loss.backward()
        optimizer.step()
        seen.append(before(replica, step))
        replica.report_loss(loss)
        replica.step()
        ends.append(time.perf_counter())
        losses.append(loss.item())
        seen.append(after(replica, step))
        if seen[-1] is True:
            break
    warm_up = min(WARM_UP, math.ceil(len(ends) / 5))
    seconds = (ends[-1] - ends[warm_up - 1]) / (len(ends) - warm_up)
    with replica.consensus() if case.consensus else nullcontext():
        scores = {name: task.score(model, *part) for name, part in scored.items()}
    replica.finish()  # all ranks together: a closed connection would end the others' run
    replica.detach()
    return Outcome(scores, losses, seconds, [each for each in seen if each is not None])


def in_threads(case: Case, before: Hook = nothing, after: Hook = nothing) -> Outcome:
    """Train workers in threads; the time they take is meaningless."""
    torch.set_num_threads(1)
    start, data = case.start(), case.task.data()  # not in threads, which share torch's generator
    world = ThreadWorld(nodes=case.nodes)
    workers = world.run(lambda mesh: work(case, start, data, mesh, before, after), timeout=1000)
    return shown(case, Outcome.of(workers))


def in_lab(cases: Sequence[Case], rate: str | None) -> list[Outcome]:
    """Train real processes on emulated nodes, case by case, with equal worlds and tasks."""
    first = cases[0]
    question = list(cases), first.task.data()  # which may take seconds: not in each process
    found: list[Outcome] = on_nodes(train_all, question, len(first.nodes), first.per_node, rate)
    return found


def train_all(question: tuple[list[Case], Data]) -> list[Outcome]:
    cases, data = question
    outcomes = []
    for case in cases:
        everyone: list[Outcome] = [None] * case.workers  # type: ignore[list-item]
        dist.all_gather_object(everyone, work(case, case.start(), data))
        outcomes.append(Outcome.of(everyone))
        if dist.get_rank() == 0:
            print(f"{case}: {outcomes[-1].seconds * 1e3:.0f} ms a step", flush=True)
    return outcomes


def shown(case: Case, outcome: Outcome) -> Outcome:
    if outcome.scores:
        scores = ", ".join(f"{name} {score:.4g}" for name, score in outcome.scores.items())
        console.print(f"{case}: {scores}", style="dim")
    return outcome
