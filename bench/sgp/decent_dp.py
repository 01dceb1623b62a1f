"""Overlap SGP and the package decent-dp train a GPT in turns: time of a step, and of the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from statistics import fmean

import torch
from torch import nn

from bench.harness import GOAL, Bench, Claim, Effect, Result, attached, command, numbers
from bench.harness.attached import Attached, Build, adamw
from bench.harness.gpt import gpt
from bench.harness.training import Training, times

OURS, THEIRS = "sgp(overlap=1)", "decent-dp"
RATE = "250mbit"
HEADINGS = ("nodes", "method", "a step", "CPU time of a rank")
BENCH = Bench(name="sgp/decent_dp", minutes=5, full_minutes=12)


def attach(method: str, model: nn.Module, build: Build) -> Attached:
    """The method, or decent-dp, whose optimizer steps inside backward."""
    if method != THEIRS:
        return attached.attach(method, model, build)
    from decent_dp.ddp import DecentralizedDataParallel  # not installed everywhere
    from loguru import logger

    logger.remove()
    module = DecentralizedDataParallel(
        model, lambda named: build(parameter for _, parameter in named), topology="one-peer-exp"
    )

    def finish() -> None:
        for message in filter(None, module._comm_ops):
            message.wait()

    @contextmanager
    def average() -> Iterator[None]:
        module.global_avg()
        yield
        module.revert_global_avg()

    return Attached(model, build([torch.zeros(1)]), module, shown=average, finish=finish)


@command(BENCH, "--nodes 8", "--full", full={"rounds": 10}, steps="Of each turn.")
def app(nodes: str = "4,8", steps: int = 20, rounds: int = 4) -> Result:
    """Time overlap SGP and decent-dp in turns."""
    if find_spec("decent_dp") is None:
        raise SystemExit("decent-dp is not installed: pip install '.[bench]'")
    turns = Training(gpt, (OURS, THEIRS), steps, rounds, lead=5, optimizer=adamw, attach=attach)
    rows, claims, found = [], [], {}
    for count in numbers(nodes):
        each = found[count] = times(turns, count, RATE)
        for method, taken in each.items():
            core = f"{fmean(taken.cores) * 1e3:.0f} ms"
            rows.append((f"{count}", method, f"{fmean(taken.paces):.3f} s", core))
        for what, figure in (("a step takes", "paces"), ("a rank needs CPU time,", "cores")):
            ratio = Effect.between(getattr(each[OURS], figure), getattr(each[THEIRS], figure), "x")
            text = f"{count} nodes: {what} no more than with decent-dp"
            claims.append(Claim(text, "at most 1.00 x", str(ratio), ratio.size <= 1.0, GOAL))
    return Result(f"Beside decent-dp, {RATE}", HEADINGS, rows, claims, found)
