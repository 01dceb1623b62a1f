"""Recovery of SGP from a lost rank: duration and effect on training.

One of 8 workers is killed with SIGKILL at a random step. Needs root.
"""

import random
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import numpy as np
import typer
from rich.progress import track

from bench.harness.bench import Bench
from bench.harness.claim import Claim
from bench.harness.console import console
from bench.harness.report import report
from bench.sgp.regression import RATE, run

WORKERS, STEPS = 8, 150
NEAR = 20  # steps over which a loss is averaged
BENCH = Bench(
    name="sgp/loss",
    claim="Training continues after a rank is killed",
    minutes=5,
)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Recovery:
    """One run in which a rank was killed."""

    seed: int
    rank: int
    step: int
    seconds: float  # the longest step of a survivor: until training went on
    before: float  # mean training loss just before
    after: float  # and at the end
    apart: float  # largest difference between the survivors' models after finish()
    named: bool  # all survivors report the lost rank and the step from which they went on


def measure(seed: int) -> Recovery:
    """Kill one of the workers at a step that depends on the seed."""
    dice = random.Random(seed)
    victim, fatal = dice.randrange(WORKERS), dice.randrange(20, STEPS // 2)
    algorithm = "sgp(overlap=1, on_failure='continue')"
    printed = run(WORKERS, algorithm, STEPS, victim, fatal, seed, expected=128 + signal.SIGKILL)
    assert sorted(printed) == [rank for rank in range(WORKERS) if rank != victim]
    losses = np.mean([worker["losses"] for worker in printed.values()], axis=0)
    models = np.array([worker["model"] for worker in printed.values()])
    lost = [worker["lost"] for worker in printed.values()]
    return Recovery(
        seed,
        victim,
        fatal,
        max(float(np.diff(worker["times"]).max()) for worker in printed.values()),
        float(losses[fatal - NEAR : fatal].mean()),
        float(losses[-NEAR:].mean()),
        float(np.ptp(models, axis=0).max()),
        all(each == lost[0] and [loss["rank"] for loss in each] == [victim] for each in lost),
    )


def show(losses: Sequence[Recovery]) -> None:
    rows = [
        (
            str(loss.seed),
            f"rank {loss.rank} at {loss.step}",
            f"{loss.seconds:.1f}",
            f"{loss.before:.4f}",
            f"{loss.after:.4f}",
            "yes" if loss.named and loss.apart == 0 else "NO",
        )
        for loss in losses
    ]
    longest = max(loss.seconds for loss in losses)
    falling = sum(loss.after < loss.before for loss in losses)
    equal = sum(loss.named and loss.apart == 0 for loss in losses)
    claims = [
        Claim("survivors train to the end, report the lost rank and are equal after finish()",
              "every run", f"{equal} of {len(losses)}", equal == len(losses)),
        Claim("training continues within 30 s of the loss", "every run", f"{longest:.1f} s at most",
              longest < 30),
        Claim("the loss keeps falling", "every run", f"{falling} of {len(losses)}",
              falling == len(losses)),
    ]  # fmt: skip
    headings = ("seed", "killed", "s until training went on", "loss before", "at the end", "equal")
    title = f"One of {WORKERS} workers killed, {STEPS} steps, {RATE}"
    report(BENCH, title, headings, rows, claims, measured=[*map(asdict, losses)])


@app.command(epilog=BENCH.examples("--seeds 3"))
def main(
    seeds: Annotated[int, typer.Option(help="Runs with a killed rank, 25 s each.")] = 10,
) -> None:
    """Kill a rank in every run and measure the recovery of the others."""
    show([measure(seed) for seed in track(range(seeds), "killing ranks", console=console)])


if __name__ == "__main__":
    app()
