"""Seconds per step of a model under several methods in turns, on emulated nodes."""

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isnan
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import offbeat
from bench.harness.ranks import on_nodes
from bench.lags.networks import TASKS, Task
from offbeat.functional import max_speedup
from offbeat.methods.top_k.ddp_hook import LagsState, lags_hook

WARM_UP, OBSERVED = 3, 10  # steps; the latter where the first ones are used to choose ratios
TORCH, POWER, HOOK, ALONE = "torch DDP", "torch PowerSGD", "lags_hook in DDP", "alone"
TOGETHER = "alone, a barrier a step"  # the cost of waiting for the slowest rank
# What no selection with error feedback does without: gradients are added to residuals, all of them
# are read once, the dense gradients are cleared for those that arrive, and ranks meet once a step.
FLOOR = "alone, a barrier and three passes a step"


@dataclass
class Times:
    """Seconds of one method's steps: means of the slowest rank for each turn, and their parts.

    Parts are forward with the optimizer, and backward: means over ranks, step by step. They do not
    add up to ``step``, since ranks that need not wait compute at different times.
    """

    slowest: list[float]
    rest: list[float]
    backward: list[float]
    sent: float | None = None  # bytes per step, where they are counted

    @property
    def step(self) -> float:
        return median(self.slowest)

    def over(self, other: "Times") -> float:
        """The ratio to the other's time, the median over rounds.

        The speed of a shared machine changes over minutes, less so within a round.
        """
        return median(a / b for a, b in zip(self.slowest, other.slowest, strict=True))

    def add(self, turn: "Times") -> None:
        """Append the times of another turn."""
        self.slowest += turn.slowest
        self.rest += turn.rest
        self.backward += turn.backward
        self.sent = turn.sent


Results = dict[str, dict[str, Times]]  # by model and method


@dataclass(frozen=True)
class Case:
    """What is timed: ``rounds`` turns of ``steps`` steps of each method on each model."""

    models: list[str]
    methods: list[str]
    steps: int
    rounds: int


def most(alone: Times, slgs: Times) -> float:
    """S_max of eq. 19, the largest speedup of overlap over slgs."""
    rest, backward = median(alone.rest), median(alone.backward)
    share = backward / (rest + backward)
    exchange = max(0.0, slgs.over(alone) - 1)  # in units of the time of a step alone
    return max_speedup(1 - share, share, exchange) if exchange else 1.0


def in_lab(
    nodes: int, rate: str | None, models: Sequence[str], methods: Sequence[str], steps: int,
    rounds: int,
) -> Results:  # fmt: skip
    """All methods in turns, round by round, in processes that start once.

    Raises RuntimeError if one of them fails.
    """
    case = Case(list(models), list(methods), steps, rounds)
    found: Results = on_nodes(measure, case, nodes, rate=rate)
    return found


def measure(case: Case) -> Results:
    """Time all models, on every rank."""
    return {model: time_model(model, case) for model in case.models}


def time_model(model: str, case: Case) -> dict[str, Times]:
    """Time one model under all methods, in turns."""
    torch.manual_seed(0)
    start = TASKS[model].model()
    torch.manual_seed(dist.get_rank())
    runs = {method: Run.of(TASKS[model], copy.deepcopy(start), method) for method in case.methods}
    found = {method: Times([], [], []) for method in runs}
    for method, run in runs.items():
        run.turn(OBSERVED if "adaptive" in method else WARM_UP)
    for turn in range(case.rounds):
        for method, run in runs.items():
            times = run.turn(case.steps)
            found[method].add(times)
            if dist.get_rank() == 0:
                print(f"{model}, {method}, {turn + 1}: {times.step:.3f} s", flush=True)
    for run in runs.values():
        run.detach()
    return found


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
        """Time ``steps`` steps, which all ranks start together."""
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
    if method == FLOOR:
        return model, three_passes(model), unknown, nothing
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


def three_passes(model: nn.Module) -> Callable[[], None]:
    """Add each gradient to a residual as soon as it is there; return the rest, a step's end."""
    size = sum(parameter.numel() for parameter in model.parameters())
    residual, dense = torch.zeros(size), torch.zeros(size)
    parts = iter(residual.split([parameter.numel() for parameter in model.parameters()]))
    for parameter, part in zip(model.parameters(), parts, strict=True):

        def add(parameter: torch.Tensor, part: torch.Tensor = part) -> None:
            assert parameter.grad is not None
            part.view_as(parameter).add_(parameter.grad)

        parameter.register_post_accumulate_grad_hook(add)

    def end() -> None:
        residual.aminmax()
        dense.zero_()
        dist.barrier()

    return end
