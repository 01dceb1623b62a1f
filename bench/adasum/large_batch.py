"""Steps to a target loss with Adam and with LAMB (Table 2 of the Adasum paper).

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
BENCH = Bench(
    name="adasum/large_batch",
    claim="Fewer steps with Adam and LAMB (Table 2)",
    minutes=6,
    full_minutes=14,
    evidence={"Table 2": "Fewer steps with Adam and with LAMB at a large batch"},
)
DATA = cache(partial(text.windows, CONTEXT))
Losses = list[list[float]]  # held out, every EVERY steps; for each seed


def warmed_up(step: int, steps: int) -> float:
    """Over a tenth, then constant."""
    return min(1.0, (step + 1) / (steps / 10))


def losses(case: Case) -> list[float]:
    """The held-out loss of the first worker, every ``EVERY`` steps."""
    found, heldout = [], DATA()[1]["heldout"]

    def look(replica: offbeat.Replica, step: int) -> None:
        if (step + 1) % EVERY == 0 and replica.world.rank == 0:
            found.append(text.score(replica.model, *heldout))

    in_threads(case, after=look)
    return found


def steps_to(target: float, losses: list[float]) -> int | None:
    return next(((i + 1) * EVERY for i, loss in enumerate(losses) if loss <= target), None)


def speed_up(reduce: Losses, adasum: Losses, steps: int) -> Effect:
    """How many times fewer steps Adasum takes to the last loss of all-reduce; 0 for never."""
    pairs = zip(reduce, adasum, strict=True)
    reached = [steps_to(theirs[-1], ours) for theirs, ours in pairs]
    return Effect.mean([steps / each if each else 0.0 for each in reached], "x")


def claim(kind: str, ours: Effect) -> Claim:
    """The paper's all-reduce with Adam never reaches the target, whatever the steps."""
    text = f"{kind}: Adasum reaches all-reduce's loss in fewer steps"
    if kind == "LAMB":
        return Claim.effect(text, Effect(7039 / 5639, "x"), ours)
    holds = ours.gain > 0 and ours.is_beyond_noise
    return Claim(text, "7039, all-reduce never", str(ours), holds)


@command(BENCH, "--steps 400 --full", full="Twice the seeds.", steps="Steps of each run.")
def app(full: bool = False, steps: int = 200, seeds: int = 3) -> Result:
    """Train a GPT with eight workers, by all-reduce and by Adasum."""
    rows, judged, curves = [], [], {}
    for kind, (optimizer, rates) in OPTIMIZERS.items():
        net = partial(GPT, 32, 2, 4, CONTEXT)
        build = partial(optimizer, lr=rates[0])
        task = Task(f"GPT, {kind}", net, DATA, BATCH, text.score, text.loss, build)
        alone = Case("alone", task, offbeat.alone(), 1, steps, rates[0], warmed_up)
        rate = min(rates, key=lambda each: losses(replace(alone, rate=each))[-1])
        found = curves[kind] = {
            name: [
                losses(Case(name, task, method, WORKERS, steps, rate, warmed_up, seed))
                for seed in range(seeds * (1 + full))
            ]
            for name, method in METHODS.items()
        }
        faster = speed_up(found["ddp"], found["adasum"], steps)
        for name, runs in found.items():
            last = str(Effect.mean([each[-1] for each in runs], "x")).removesuffix(" x")
            rows.append((kind, name, f"{rate:g}", last, str(faster) if name == "adasum" else ""))
        judged.append(claim(kind, faster))
    title = f"GPT, {WORKERS} workers of {BATCH}, {steps} steps"
    return Result(title, HEADINGS, rows, judged, raw=curves)
