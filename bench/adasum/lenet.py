"""Holds at batch 1024 untuned, where an all-reduce fails.

LeNet-5 on the schedule of batch 32. Virtual workers with 32 images each, ten epochs of 8,000 real
digits, SGD with momentum 0.5, linear warm-up and decay. The rate is tuned at batch 32. Untuned,
Adasum takes this rate and all-reduce takes it for the sum of all gradients; tuned, each takes the
best of several. Rates are those of one worker, as in the paper: all-reduce's mean gradient takes
them times the workers.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

import offbeat
from bench.adasum.mnist import lenet, real_or_exit
from bench.harness import Bench, Claim, Effect, Result, command
from bench.harness.case import Case, Data, Task
from bench.harness.seeds import in_threads

BATCH, EPOCHS, WARM_UP = 32, 10, 0.17
RATES = (0.01, 0.03, 0.1)  # tried at batch 32
WORKERS = *_, MOST = (4, 8, 16, 32)
REDUCE, ADASUM = "all-reduce", "Adasum"
METHODS = {REDUCE: offbeat.ddp(), ADASUM: offbeat.adasum()}
# Of that rate, tried beside 1 at the largest batch, and with --full at all.
FACTORS = {REDUCE: (1 / 32, 1 / 16, 1 / 8, 1 / 4), ADASUM: (2, 4)}
LEARNS = 90.0  # % accuracy; ten classes by chance: 10
HEADINGS = ("batch", REDUCE, "tuned (rate)", ADASUM, "tuned (rate)")
SGD = partial(torch.optim.SGD, lr=0.0, momentum=0.5)
BENCH = Bench(name="adasum/lenet", minutes=3, full_minutes=12, evidence="Fig. 4")


class Run(NamedTuple):
    method: str
    workers: int
    lr: float  # of one worker
    accuracy: float
    seed: int = 0


Chosen = dict[tuple[str, int], Run]  # by method and workers


def schedule(step: int, steps: int) -> float:
    """Linear up over the first 17 %, linear down to zero."""
    warm = WARM_UP * steps
    return min((step + 1) / warm, (steps - step) / (steps - warm))


def train(data: Data, method: str, workers: int, lr: float, seed: int = 0) -> Run:
    task = Task(f"LeNet-5, {lr:.4g}", lenet, lambda: data, BATCH, optimizer=SGD)
    steps = task.steps(EPOCHS * len(data[0][0]), workers)
    rate = lr * (workers if method == REDUCE else 1)
    case = Case(method, task, METHODS[method], workers, steps, rate, schedule, seed)
    return Run(method, workers, lr, in_threads(case).heldout, seed)


def best(runs: Sequence[Run]) -> Run:
    return max(runs, key=lambda run: run.accuracy)


def cell(runs: Sequence[Run]) -> str:
    return f"{best(runs).accuracy:.2f}% ({best(runs).lr:.4g})" if len(runs) > 1 else "-"


def claims(untuned: Chosen, tuned: Chosen, again: Sequence[tuple[Run, Run]]) -> list[Claim]:
    """``again``: with other seeds, untuned Adasum and tuned all-reduce with the most workers."""
    reduce, adasum = ([untuned[method, w].accuracy for w in WORKERS] for method in METHODS)
    theirs, ours = (tuned[method, MOST] for method in METHODS)
    pairs = [(untuned[ADASUM, MOST], theirs), *again]
    above = Effect.mean([a.accuracy - b.accuracy for a, b in pairs])
    return [
        Claim.effect("batch 1024: Adasum's best rate of a worker is higher than all-reduce's",
                     Effect(0.02 / 0.004, "x"), Effect(ours.lr / theirs.lr, "x")),
        Claim("untuned all-reduce fails above batch 256", "fails at 512 and 1024",
              f"{'/'.join(f'{a:.1f}%' for a in reduce)} at 128/256/512/1024",
              max(reduce[2:]) < LEARNS),
        Claim("untuned Adasum holds at batch 1024", "converges", f"{adasum[-1]:.1f}%",
              adasum[-1] > LEARNS),
        Claim("batch 1024: untuned Adasum is more accurate than tuned all-reduce", "far more",
              str(above), above.size > 0 and above.is_beyond_noise),
    ]  # fmt: skip


@command(BENCH, full="Tune at every batch.", seeds="Runs of what is compared at batch 1024.")
def app(full: bool = False, seeds: int = 3) -> Result:
    run = partial(train, data := real_or_exit(BENCH))
    runs = [run(REDUCE, 1, rate) for rate in RATES]
    lr, rows = best(runs).lr, [(f"{BATCH}", cell(runs), "", "", "")]
    untuned: Chosen = {}
    tuned: Chosen = {}
    for workers in WORKERS:
        cells = []
        for method in METHODS:
            factors = FACTORS[method] if full or workers == MOST else ()
            tried = [run(method, workers, lr * factor) for factor in (1, *factors)]
            untuned[method, workers], tuned[method, workers] = tried[0], best(tried)
            cells += [f"{tried[0].accuracy:.2f}%", cell(tried)]
            runs += tried
        rows.append((f"{workers * BATCH}", *cells))
    compared = untuned[ADASUM, MOST], tuned[REDUCE, MOST]
    again = [
        tuple(run(each.method, each.workers, each.lr, seed) for each in compared)
        for seed in range(1, seeds)
    ]
    title = f"LeNet-5 on {len(data[0][0])} real digits, rate {lr:g} tuned at batch {BATCH}"
    measured = [each._asdict() for each in [*runs, *(each for pair in again for each in pair)]]
    return Result(title, HEADINGS, rows, claims(untuned, tuned, again), measured=measured)
