"""Seconds per step of several methods in real processes on emulated nodes, in one run."""

import copy
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist

import offbeat
from bench.harness.attached import Task, attach
from bench.harness.gpt import gpt
from bench.harness.pause import paused
from bench.harness.ranks import on_nodes
from offbeat.telemetry.recorder import FOLDER_VARIABLE
from offbeat.telemetry.recording import Recording, read_run


@dataclass(frozen=True)
class Timed:
    """One training run. The first ``warm_up`` steps do not count, but for the whole."""

    name: str
    algorithm: offbeat.Algorithm
    steps: int
    warm_up: int = 2


@dataclass(frozen=True)
class StepTime:
    """The times of a run, in seconds."""

    step: float  # on the slowest rank
    whole: float  # from the first step to the end of finish(), on the slowest rank
    stalled: float  # of a step, waiting for others; the mean over ranks
    in_flight: float  # of one message between nodes, from start to end; 0 without messages

    @classmethod
    def least(cls, runs: Sequence["StepTime"]) -> "StepTime":
        """The least of all runs: other load on the machine can only add time."""
        return cls(*map(min, zip(*map(astuple, runs), strict=True)))

    @classmethod
    def of(cls, ranks: Sequence[tuple[Recording, float]], warm_up: int) -> "StepTime":
        """From each rank's recording, and the seconds that it took."""
        counted = [recording.steps[warm_up:] for recording, _ in ranks]
        every = [*chain.from_iterable(counted)]
        in_flight = [  # recorded in every step that a message spans; counted where it ends
            end - start
            for step in every
            for kind, start, end in step.spans
            if kind == "exchange:node" and 0 <= end < step.seconds
        ]
        return cls(
            step=max(fmean(step.seconds for step in steps) for steps in counted),
            whole=max(seconds for _, seconds in ranks),
            stalled=fmean(step.seconds_stalled for step in every),
            in_flight=fmean(in_flight or [0.0]),
        )

    def __str__(self) -> str:
        return f"{self.step:.3f} s a step, {self.stalled:.3f} s of it waiting"


def step_times(
    cases: Sequence[Timed], nodes: int, per_node: int, rate: str,
    pause: tuple[float, int] | None = None,
) -> dict[str, StepTime]:  # fmt: skip
    """Run all cases one by one: a GPT of 13.0 MB, or a model that pauses for (seconds, width).

    A name that comes more than once has the least of its times.
    """
    times: list[StepTime] = on_nodes(train_task, (list(cases), pause), nodes, per_node, rate)
    found: dict[str, list[StepTime]] = {case.name: [] for case in cases}
    for case, time_of in zip(cases, times, strict=True):
        found[case.name].append(time_of)
    return {name: StepTime.least(runs) for name, runs in found.items()}


def train_task(question: tuple[list[Timed], tuple[float, int] | None]) -> list[StepTime]:
    cases, pause = question
    return train_all(cases, paused(*pause) if pause else gpt())


def train_all(cases: Sequence[Timed], task: Task, finishes: bool = True) -> list[StepTime]:
    """Run all cases on copies of the task's model, on every rank."""
    own = []
    for case in cases:
        own.append(train(case, task, finishes))
        if dist.get_rank() == 0:
            print(f"{case.name}: {StepTime.of(own[-1:], case.warm_up)}", flush=True)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)  # once: far away it takes as long as a step
    each = zip(cases, zip(*everyone, strict=True), strict=True)
    return [StepTime.of(ranks, case.warm_up) for case, ranks in each]


def train(case: Timed, task: Task, finishes: bool = True) -> tuple[Recording, float]:
    """One run of this rank: what it recorded, and the seconds it took, with ``finish()`` or not."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FOLDER_VARIABLE] = folder
        run = attach(case.algorithm, copy.deepcopy(task.model), torch.optim.AdamW)
        began = time.perf_counter()
        for _ in range(case.steps):
            run.step(task.loss)
        if finishes:
            run.finish()
        seconds = time.perf_counter() - began
        run.close()
        return read_run(Path(folder))[0], seconds
