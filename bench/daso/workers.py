"""Accuracy of DASO by number of workers on MNIST-1D (Figure 7 of the paper).

The number of samples is the same for all world sizes, and the learning rate grows with the number
of workers. Virtual workers report no loss, so that B stays 4 between warm-up and cool-down.
"""

from statistics import fmean, stdev
from typing import Annotated

import typer

import offbeat
from bench.harness.bench import Bench
from bench.harness.claim import Claim
from bench.harness.effect import Effect
from bench.harness.mnist1d_task import Case, sgp_schedule, train
from bench.harness.report import report

PER_NODE = 4
RATE, PASSES = 0.01, 50.0  # learning rate of one worker, passes over the data
WORLDS = (8, 16, 32, 64)
NEAR = 1.0  # % that do not count
HEADINGS = ("workers", "method", "steps", "held out", "against ddp")
BENCH = Bench(
    name="daso/workers",
    claim="DASO is near averaging, but at the most workers",
    minutes=4,
    full_minutes=8,
    evidence={"Fig. 7, 9": "As accurate as averaging, but with the most workers"},
)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
Found = dict[int, dict[str, list[float]]]  # held-out accuracies in %, one for each seed


def ddp(steps: int) -> offbeat.Algorithm:
    return offbeat.ddp()


def daso(steps: int) -> offbeat.Algorithm:
    phase = max(1, steps // 20)
    return offbeat.daso(every=4, total_steps=steps, warmup_steps=phase, cooldown_steps=phase)


METHODS = {"ddp": ddp, "DASO": daso}


def case(name: str, world: int, seed: int) -> Case:
    return Case(name, METHODS[name], world, seed, sgp_schedule, RATE, PER_NODE, PASSES)


def measure(seeds: int) -> Found:
    """All methods with all numbers of workers."""
    return {
        world: {
            name: [train(case(name, world, seed)).heldout for seed in range(seeds)]
            for name in METHODS
        }
        for world in WORLDS
    }


def gaps(found: Found, world: int) -> list[float]:
    """By how much DASO is better than averaging, seed by seed."""
    return [a - b for a, b in zip(found[world]["DASO"], found[world]["ddp"], strict=True)]


def claims(found: Found) -> list[Claim]:
    made, (*few, many) = [], WORLDS
    for world in few:
        gap = Effect.mean(gaps(found, world))
        text = f"{world} workers: DASO is about as accurate as ddp (Fig. 7)"
        made.append(Claim(text, "similar up to 128 GPUs", str(gap), gap.size > -NEAR))
    falls = {
        name: Effect.mean(
            [b - a for a, b in zip(*(found[w][name] for w in (few[0], many)), strict=True)]
        )
        for name in METHODS
    }
    ours = ", ".join(f"{name} {fall}" for name, fall in falls.items())
    is_worse = all(fall.size < 0 and fall.is_beyond_noise for fall in falls.values())
    text = f"both are worse with {many} workers than with {few[0]} (Fig. 7)"
    made.append(Claim(text, "below 75 % with 256 GPUs", ours, is_worse))
    gap = Effect.mean(gaps(found, many))
    text = f"{many} workers: DASO is less accurate than ddp (Fig. 7)"
    is_less = gap.size < -NEAR and gap.is_beyond_noise
    return [*made, Claim(text, "more dramatic with DASO", str(gap), is_less)]


@app.command(epilog=BENCH.examples("--full"))
def main(
    full: Annotated[bool, typer.Option("--full", help="Twice the seeds.")] = False,
    seeds: Annotated[int, typer.Option(min=2, help="Runs of each method.")] = 5,
) -> None:
    """Compare DASO and averaged gradients with 8 to 64 workers."""
    found = measure(seeds * (2 if full else 1))
    rows = [
        (f"{world}", name, f"{case(name, world, 0).steps}",
         f"{fmean(runs):.1f} ± {stdev(runs):.1f}%", f"{fmean(runs) - fmean(methods['ddp']):+.1f}%")
        for world, methods in found.items() for name, runs in methods.items()
    ]  # fmt: skip
    title = f"Figure 7: held-out accuracy, {PER_NODE} workers per node"
    report(BENCH, title, HEADINGS, rows, claims(found), measured=found)


if __name__ == "__main__":
    app()
