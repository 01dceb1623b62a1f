"""A step of overlap SGP and the CPU time it needs, beside the package decent-dp.

Both train the GPT of 3.2 million parameters in the same loop with the same optimizer, in turns in
the same processes on emulated nodes.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from statistics import fmean

import torch
from torch import nn

from bench.harness import GOAL, Bench, Claim, Effect, Result, attached, command, numbers
from bench.harness.attached import Attached, Build, adamw
from bench.harness.gpt import gpt
from bench.harness.training import Found, Training, times

OURS, THEIRS = "sgp(overlap=1)", "decent-dp"
RATE = "250mbit"
HEADINGS = ("nodes", "method", "a step", "CPU time of a rank")
BENCH = Bench(
    name="sgp/decent_dp",
    claim="Overlap SGP is no slower than decent-dp",
    minutes=5,
    full_minutes=12,
)


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

    return Attached(model, build([torch.zeros(1)]), module, finish=finish)


def rows(nodes: int, found: Found) -> Iterator[tuple[str, ...]]:
    for method, each in found.items():
        core = f"{fmean(each.cores) * 1e3:.0f} ms"
        yield f"{nodes}", method, f"{fmean(each.paces):.3f} s", core


def claims(nodes: int, found: Found) -> Iterator[Claim]:
    """Ours as a multiple of theirs, over the rounds."""
    ours, theirs = found[OURS], found[THEIRS]
    for what, times_of in (
        ("a step takes", (ours.paces, theirs.paces)),
        ("a rank needs CPU time,", (ours.cores, theirs.cores)),
    ):
        ratio = Effect.between(*times_of, "x")
        text = f"{nodes} nodes: {what} no more than with decent-dp"
        yield Claim(text, "at most 1.00 x", str(ratio), ratio.size <= 1.0, GOAL)


@command(BENCH, "--nodes 8", "--full", full="Ten rounds.", steps="Of each turn.")
def app(full: bool = False, nodes: str = "4,8", steps: int = 20, rounds: int = 4) -> Result:
    """Time overlap SGP and decent-dp in turns."""
    if find_spec("decent_dp") is None:
        raise SystemExit("decent-dp is not installed: pip install '.[bench]'")
    turns = Training(gpt, (OURS, THEIRS), steps, 10 if full else rounds, lead=5, optimizer=adamw,
                     attach=attach)  # fmt: skip
    found = {count: times(turns, count, RATE) for count in numbers(nodes)}
    return Result.by_case(f"Beside decent-dp, {RATE}", HEADINGS, found, rows, claims)
