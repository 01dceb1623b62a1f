"""Accuracy of DASO by number of workers on MNIST-1D (Figure 7 of the paper).

The number of samples is the same for all world sizes, and the learning rate grows with the number
of workers. Virtual workers report no loss, so that B stays 4 between warm-up and cool-down.
"""

from dataclasses import replace

import offbeat
from bench.harness import NEAR, Bench, Claim, Result, command
from bench.harness.case import Case
from bench.harness.rows import in_rows, signals_case
from bench.harness.seeds import Runs, over_seeds

PER_NODE = 4
PASSES, RATE = 50.0, 0.01  # over the data; of one worker
WORLDS = FEW, *_, MANY = (8, 16, 32, 64)
DDP, DASO = METHODS = ("ddp", "DASO")
HEADINGS = ("workers", "method", "steps", "held out", "against ddp")
BENCH = Bench(
    name="daso/workers",
    claim="DASO is near averaging, but at the most workers",
    minutes=4,
    full_minutes=8,
    evidence={"Fig. 7, 9": "As accurate as averaging, but with the most workers"},
)
Found = dict[int, dict[str, Runs]]  # by workers and method


def case(name: str, workers: int) -> Case:
    case = signals_case(name, offbeat.ddp(), workers, PASSES, RATE)
    if name == DASO:
        phase = max(1, case.steps // 20)
        daso = offbeat.daso(
            every=4, total_steps=case.steps, warmup_steps=phase, cooldown_steps=phase
        )
        case = replace(case, algorithm=daso)
    return replace(case, per_node=PER_NODE)


def claims(found: Found) -> list[Claim]:
    gaps = {workers: found[workers][DASO].over(found[workers][DDP]) for workers in WORLDS}
    falls = [found[MANY][name].over(found[FEW][name]) for name in METHODS]
    similar = [
        Claim(f"{workers} workers: DASO is about as accurate as ddp (Fig. 7)",
              "similar up to 128 GPUs", str(gaps[workers]), gaps[workers].size > -NEAR)
        for workers in WORLDS[:-1]
    ]  # fmt: skip
    return [
        *similar,
        Claim(f"both are worse with {MANY} workers than with {FEW} (Fig. 7)",
              "below 75 % with 256 GPUs",
              ", ".join(f"{name} {fall}" for name, fall in zip(METHODS, falls, strict=True)),
              all(fall.size < 0 and fall.is_beyond_noise for fall in falls)),
        Claim(f"{MANY} workers: DASO is less accurate than ddp (Fig. 7)", "more dramatic with DASO",
              str(gaps[MANY]), gaps[MANY].size < -NEAR and gaps[MANY].is_beyond_noise),
    ]  # fmt: skip


@command(BENCH, "--full", full="Twice the seeds.")
def app(full: bool = False, seeds: int = 5) -> Result:
    """Compare DASO and averaged gradients with 8 to 64 workers."""
    rows, found = [], {}
    for workers in WORLDS:
        cases = [case(name, workers) for name in METHODS]
        runs = [over_seeds(in_rows, each, seeds * (1 + full)) for each in cases]
        found[workers] = dict(zip(METHODS, runs, strict=True))
        for each, scores in zip(cases, runs, strict=True):
            against = f"{scores.mean - runs[0].mean:+.1f}%"
            rows.append((f"{workers}", each.name, f"{each.steps}", str(scores), against))
    title = f"Figure 7: held-out accuracy, {PER_NODE} workers per node"
    return Result(title, HEADINGS, rows, claims(found), measured=found)
