"""Fewer steps with Adam and with LAMB at a large batch.

Eight virtual workers train a small GPT. Learning rates are tuned with one worker; all-reduce and
Adasum use them unchanged on eight times the batch. The target is the last loss of all-reduce.
"""

from dataclasses import replace
from functools import cache, partial

import torch
from char_gpt import GPT
from pytorch_optimizer import Lamb

import offbeat
from bench.harness import Bench, Claim, Effect, Result, command, text
from bench.harness.case import Case, Task
from bench.harness.seeds import in_threads

WORKERS, BATCH, CONTEXT, EVERY = 8, 4, 32, 10
METHODS = {"ddp": offbeat.ddp(), "adasum": offbeat.adasum()}
OPTIMIZERS = {"Adam": (torch.optim.Adam, (1e-3, 3e-3, 1e-2)), "LAMB": (Lamb, (3e-3, 1e-2, 3e-2))}
HEADINGS = ("optimizer", "method", "lr", "loss at the end", "fewer steps to all-reduce's")
BENCH = Bench(name="adasum/large_batch", minutes=6, full_minutes=14, evidence="Table 2")
DATA = cache(partial(text.windows, CONTEXT))
Losses = list[float]  # held out, every EVERY steps


def warmed_up(step: int, steps: int) -> float:
    """Over a tenth, then constant."""
    return min(1.0, (step + 1) / (steps / 10))


def losses(case: Case) -> Losses:
    """Those of the first worker."""

    def look(replica: offbeat.Replica, step: int) -> float | None:
        is_seen = (step + 1) % EVERY == 0 and replica.world.rank == 0
        return text.score(replica.model, *DATA()[1]["heldout"]) if is_seen else None

    return [*in_threads(case, after=look).seen]


def steps_to(target: float, losses: Losses) -> int | None:
    return next(((i + 1) * EVERY for i, loss in enumerate(losses) if loss <= target), None)


def speed_up(reduce: list[Losses], adasum: list[Losses], steps: int) -> Effect:
    """How many times fewer steps Adasum takes to the last loss of all-reduce; 0 for never."""
    pairs = zip(reduce, adasum, strict=True)
    reached = [steps_to(theirs[-1], ours) for theirs, ours in pairs]
    return Effect.mean([steps / each if each else 0.0 for each in reached], "x")


@command(BENCH, "--steps 400 --full", full={"seeds": 6})
def app(steps: int = 200, seeds: int = 3) -> Result:
    rows, claims = [], []
    for kind, (optimizer, rates) in OPTIMIZERS.items():
        net, build = partial(GPT, 32, 2, 4, CONTEXT), partial(optimizer, lr=rates[0])
        task = Task(f"GPT, {kind}", net, DATA, BATCH, text.score, text.loss, build)
        alone = Case("alone", task, offbeat.alone(), 1, steps, rates[0], warmed_up)
        rate = min(rates, key=lambda each: losses(replace(alone, rate=each))[-1])
        found = {}
        for name, method in METHODS.items():
            case = Case(name, task, method, WORKERS, steps, rate, warmed_up)
            found[name] = [losses(replace(case, seed=seed)) for seed in range(seeds)]
        faster = speed_up(found["ddp"], found["adasum"], steps)
        for name, runs in found.items():
            last = str(Effect.mean([each[-1] for each in runs], "x")).removesuffix(" x")
            rows.append((kind, name, f"{rate:g}", last, str(faster) if name == "adasum" else ""))
        statement = f"{kind}: Adasum reaches all-reduce's loss in fewer steps"
        if kind == "LAMB":
            claims.append(Claim.effect(statement, Effect(7039 / 5639, "x"), faster))
        else:  # the paper's all-reduce never reaches the target, whatever the steps
            holds = faster.gain > 0 and faster.is_beyond_noise
            claims.append(Claim(statement, "7039, all-reduce never", str(faster), holds))
    title = f"GPT, {WORKERS} workers of {BATCH}, {steps} steps"
    return Result(title, HEADINGS, rows, claims)
