"""What a step of a model takes under each method, in real processes on the nodes of the lab.

This file is also the script that every rank runs.
"""

import copy
import json
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import isnan
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from _lags_models import TASKS, Task
from rich.console import Console
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import offbeat
from offbeat.compare import network
from offbeat.functional import max_speedup
from offbeat.integrations.ddp import LagsState, lags_hook

WARM_UP, WATCHED = 3, 10  # steps; the latter where ratios are measured in the first ones
TORCH, POWER, HOOK, ALONE = "torch DDP", "torch PowerSGD", "lags_hook in DDP", "alone"
TOGETHER = "alone, a barrier a step"  # what it costs that the slowest rank sets the pace
console = Console(highlight=False)


@dataclass
class Times:
    """Seconds of one method's steps: of the slowest rank, a mean for each turn; and its parts.

    Those are forward with the optimizer, and backward, means over ranks, step by step. They do
    not add up to ``step``: ranks that need not wait for each other compute at different times, and
    whoever is alone on a core is quick.
    """

    slowest: list[float]
    rest: list[float]
    backward: list[float]
    sent: float | None = None  # bytes a step, where they are counted

    @property
    def step(self) -> float:
        return median(self.slowest)

    def over(self, other: "Times") -> float:
        """How many times as long as the other's: the median over rounds, in which both had a turn.

        The machine may be half as fast a minute later; within a round that is the same for all.
        """
        return median(a / b for a, b in zip(self.slowest, other.slowest, strict=True))


Results = dict[str, dict[str, Times]]  # by model and method


def most(alone: Times, slgs: Times) -> float:
    """S_max, the most that overlap can win over slgs: of what slgs adds to computation (eq. 19)."""
    rest, backward = median(alone.rest), median(alone.backward)
    share = backward / (rest + backward)
    exchange = max(0.0, slgs.over(alone) - 1)  # in units of the time of a step alone
    return max_speedup(1 - share, share, exchange) if exchange else 1.0


def in_lab(
    nodes: int, rate: str | None, models: Sequence[str], methods: Sequence[str], steps: int,
    rounds: int,
) -> Results:  # fmt: skip
    """All methods in turns, round by round, in processes that start once; raises if one dies."""
    last = deque[str](maxlen=30)

    def show(rank: int | None, line: str) -> None:
        last.append(line)
        if rank == 0:
            console.print(line, style="dim", markup=False)

    with tempfile.TemporaryDirectory() as name, network(nodes, 1, rate) as (place, unshaped):
        if unshaped and rate:
            console.print(unshaped)
        file = Path(name, "found.json")
        plan = json.dumps([list(models), list(methods), steps, rounds])
        if place.run([sys.executable, __file__, plan, str(file)], on_line=show):
            raise RuntimeError("a rank failed:\n" + "\n".join(last))
        found = json.loads(file.read_text("utf-8"))
    return {m: {way: Times(**times) for way, times in ways.items()} for m, ways in found.items()}


def run_rank(plan: str, file: Path) -> None:
    """One process in the lab."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    models, methods, steps, rounds = json.loads(plan)
    found: Results = {model: {} for model in models}
    for model in models:
        torch.manual_seed(0)
        start = TASKS[model].model()
        torch.manual_seed(dist.get_rank())
        runs = {method: Run.of(TASKS[model], copy.deepcopy(start), method) for method in methods}
        for method, run in runs.items():
            run.turn(WATCHED if "adaptive" in method else WARM_UP)
            found[model][method] = Times([], [], [])
        for turn in range(rounds):
            for method, run in runs.items():
                times, so_far = run.turn(steps), found[model][method]
                for name in ("slowest", "rest", "backward"):
                    getattr(so_far, name).extend(getattr(times, name))
                so_far.sent = times.sent
                if dist.get_rank() == 0:
                    print(f"{model}, {method}, {turn + 1}: {times.step:.3f} s", flush=True)
        for run in runs.values():
            run.detach()
    if dist.get_rank() == 0:
        plain = {m: {way: asdict(t) for way, t in ways.items()} for m, ways in found.items()}
        file.write_text(json.dumps(plain), "utf-8")
    dist.destroy_process_group()


@dataclass
class Run:
    """A model under one method, which stays attached from turn to turn."""

    task: Task
    batch: tuple[torch.Tensor, torch.Tensor]
    optimizer: torch.optim.Optimizer
    module: nn.Module
    after: Callable[[], None]  # what follows the optimizer
    sent: Callable[[], float]  # bytes so far
    detach: Callable[[], None]

    @classmethod
    def of(cls, task: Task, model: nn.Module, method: str) -> "Run":
        """Attach; SGD with momentum."""
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        return cls(task, task.batch(), optimizer, *attach(method, model, optimizer))

    def turn(self, steps: int) -> Times:
        """Time ``steps`` steps, which all ranks begin together."""
        marks: list[tuple[float, float]] = []
        before = self.sent()
        dist.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            started = time.perf_counter()
            loss = self.task.loss(self.module, *self.batch)
            forward = time.perf_counter()
            loss.backward()
            backward = time.perf_counter()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.after()
            ended = time.perf_counter()
            marks.append((ended - started - (backward - forward), backward - forward))
        slowest = torch.tensor([(ended - began) / steps])
        columns = torch.tensor(marks).T.contiguous()
        counted = (self.sent() - before) / steps
        dist.barrier()
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        dist.all_reduce(columns)
        parts = (columns / dist.get_world_size()).tolist()
        return Times(slowest.tolist(), *parts, None if isnan(counted) else counted)


def attach(
    method: str, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module, Callable[[], None], Callable[[], float], Callable[[], None]]:
    """The module to call, what follows the optimizer, the bytes sent so far, and the end."""
    nothing: Callable[[], None] = lambda: None  # noqa: E731
    unknown: Callable[[], float] = lambda: float("nan")  # noqa: E731
    if method == TOGETHER:
        return model, dist.barrier, unknown, nothing
    if method not in (TORCH, POWER, HOOK):
        replica = offbeat.replicate(model, offbeat.algorithm(method), optimizer=optimizer)
        sent = lambda: float(replica.stats()["total"]["bytes_sent"])  # noqa: E731
        return model, replica.step, sent, replica.detach
    ddp = DistributedDataParallel(model)
    if method == POWER:
        ddp.register_comm_hook(PowerSGDState(None, 1, start_powerSGD_iter=2), powerSGD_hook)
    elif method == HOOK:
        ddp.register_comm_hook(LagsState(ddp, optimizer=optimizer), lags_hook)
    return ddp, nothing, unknown, nothing


if __name__ == "__main__":
    run_rank(sys.argv[1], Path(sys.argv[2]))
