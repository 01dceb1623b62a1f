"""What training takes under each method: real processes on emulated nodes, all in one run.

This file is also the script that every rank runs.
"""

import copy
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from _ranks import on_nodes, run_rank
from torch import Tensor, nn

import offbeat
from offbeat.compare import Recording, read_run
from offbeat.telemetry import FOLDER

Loss = Callable[[nn.Module], Tensor]


@dataclass(frozen=True)
class Timed:
    """One training run. The first ``warm_up`` steps do not count, but for the whole."""

    name: str
    algorithm: offbeat.Algorithm
    steps: int
    warm_up: int = 2


@dataclass(frozen=True)
class Pace:
    """What a run took, in seconds."""

    step: float  # on the slowest rank
    whole: float  # from the first step to the end of finish(), on the slowest rank
    stalled: float  # of a step, waiting for others; the mean over ranks
    travel: float  # of one message between nodes, from its start to its end; 0 without any

    def __str__(self) -> str:
        return f"{self.step:.3f} s a step, {self.stalled:.3f} s of it waiting"

    @classmethod
    def of(cls, ranks: Sequence[tuple[Recording, float]], warm_up: int) -> "Pace":
        """From what each rank recorded, and the seconds that it took."""
        counted = [recording.steps[warm_up:] for recording, _ in ranks]
        spans = [span for steps in counted for step in steps for span in step.spans]
        travels = [end - start for kind, start, end in spans if kind == "wire:node"]
        return cls(
            step=max(fmean(step.seconds for step in steps) for steps in counted),
            whole=max(seconds for _, seconds in ranks),
            stalled=fmean(step.seconds_stalled for steps in counted for step in steps),
            travel=fmean(travels or [0.0]),
        )


class Pause(torch.autograd.Function):
    """Computing that takes time but no core, as an accelerator's does; twice as long backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grads[0], None


class Paused(nn.Module):
    """Eight layers, 0.8 MB of parameters, which pause for ``seconds`` in a step."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(156, 156) for _ in range(8))
        self.seconds = seconds / 3 / len(self.layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = Pause.apply(layer(x), self.seconds)
        return x


def task(pause: float | None) -> tuple[nn.Module, Loss]:
    """A model, and its loss on a fixed batch: what is learnt does not matter."""
    torch.manual_seed(0)
    if pause is not None:
        return Paused(pause), lambda model: model(torch.ones(1, 156)).square().mean()
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    from char_gpt import CHARACTERS, GPT, loss_of  # here: only ranks in the lab need it

    text = torch.randint(len(CHARACTERS), (3 * 129,))
    return GPT(256, 4, 4, 128), lambda model: loss_of(model, text, 129 * torch.arange(3), 128)


def paces(
    cases: Sequence[Timed], nodes: int, per_node: int, rate: str, pause: float | None = None
) -> list[Pace]:
    """Run all cases in turn. What computes is a GPT of 13.4 MB or, for ``pause`` s, nothing."""
    found: list[Pace] = on_nodes(__file__, (list(cases), pause), nodes, per_node, rate)
    return found


def train_all(question: tuple[list[Timed], float | None]) -> list[Pace]:
    cases, pause = question
    start, loss_of = task(pause)
    found = []
    for case in cases:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, train(case, copy.deepcopy(start), loss_of))
        found.append(Pace.of(everyone, case.warm_up))
        if dist.get_rank() == 0:
            print(f"{case.name}: {found[-1]}", flush=True)
    return found


def train(case: Timed, model: nn.Module, loss_of: Loss) -> tuple[Recording, float]:
    """One run of this rank: what it recorded, and the seconds it took."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FOLDER] = folder
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


if __name__ == "__main__":
    import _steps  # what a script itself defines could not be unpickled where the answer goes

    run_rank(Path(sys.argv[2]), _steps.train_all)
