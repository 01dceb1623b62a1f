"""Seconds per step of several methods in real processes on emulated nodes, in one run."""

import copy
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import offbeat
from bench.harness.pause import Paused
from bench.harness.ranks import on_nodes
from offbeat.telemetry.recorder import FOLDER_VARIABLE
from offbeat.telemetry.recording import Recording, read_run

Loss = Callable[[nn.Module], Tensor]


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

    def __str__(self) -> str:
        return f"{self.step:.3f} s a step, {self.stalled:.3f} s of it waiting"

    @classmethod
    def of(cls, ranks: Sequence[tuple[Recording, float]], warm_up: int) -> "StepTime":
        """From each rank's recording, and the seconds that it took."""
        counted = [recording.steps[warm_up:] for recording, _ in ranks]
        in_flight = [  # recorded in every step that a message spans; counted where it ends
            end - start
            for step in chain.from_iterable(counted)
            for kind, start, end in step.spans
            if kind == "exchange:node" and 0 <= end < step.seconds
        ]
        return cls(
            step=max(fmean(step.seconds for step in steps) for steps in counted),
            whole=max(seconds for _, seconds in ranks),
            stalled=fmean(step.seconds_stalled for step in chain.from_iterable(counted)),
            in_flight=fmean(in_flight or [0.0]),
        )


def task(pause: tuple[float, int] | None) -> tuple[nn.Module, Loss]:
    """A model, and its loss on a fixed batch."""
    torch.manual_seed(0)
    if pause is not None:
        model = Paused(*pause)
        return model, lambda model: model(torch.ones(1, model.width)).square().mean()
    from char_gpt import CHARACTERS, GPT, loss_of  # imported late: only ranks need it

    text = torch.randint(len(CHARACTERS), (3 * 129,))
    return GPT(256, 4, 4, 128), lambda model: loss_of(model, text, 129 * torch.arange(3), 128)


def step_times(
    cases: Sequence[Timed],
    nodes: int,
    per_node: int,
    rate: str,
    pause: tuple[float, int] | None = None,
) -> list[StepTime]:
    """Run all cases in turn: a GPT of 13.0 MB, or a model that pauses for (seconds, width)."""
    found: list[StepTime] = on_nodes(train_all, (list(cases), pause), nodes, per_node, rate)
    return found


def train_all(question: tuple[list[Timed], tuple[float, int] | None]) -> list[StepTime]:
    """Run all cases, on every rank."""
    cases, pause = question
    start, loss_of = task(pause)
    found = []
    for case in cases:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, train(case, copy.deepcopy(start), loss_of))
        found.append(StepTime.of(everyone, case.warm_up))
        if dist.get_rank() == 0:
            print(f"{case.name}: {found[-1]}", flush=True)
    return found


def train(case: Timed, model: nn.Module, loss_of: Loss) -> tuple[Recording, float]:
    """One run of this rank: what it recorded, and the seconds it took."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FOLDER_VARIABLE] = folder
        replica = offbeat.replicate(model, case.algorithm)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        began = time.perf_counter()
        for _ in range(case.steps):
            loss = loss_of(model)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            replica.report_loss(loss)
            replica.step()
        replica.finish()
        seconds = time.perf_counter() - began
        replica.detach()
        return read_run(Path(folder))[0], seconds
