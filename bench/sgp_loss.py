"""A rank is lost: how long the others wait, and what becomes of the training.

Of 8 workers of `sgp(overlap=1, on_loss="continue")` one gets SIGKILL at a random step. In the lab:
real processes, a network for each, the store with the launcher. Needs root.
"""

import random
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import numpy as np
import typer
from _claims import Claim, report
from _sgp_worker import RATE, run
from rich.console import Console
from rich.progress import track

WORKERS, STEPS = 8, 150
NEAR = 20  # steps over which a loss is averaged
EPILOG = "Examples: `python bench/sgp_loss.py`, `python bench/sgp_loss.py --seeds 3`"
app = typer.Typer(pretty_exceptions_enable=False)
console = Console(highlight=False)


@dataclass(frozen=True)
class Loss:
    """One run in which a rank was killed."""

    seed: int
    rank: int
    step: int
    seconds: float  # the longest step of a survivor: until training went on
    before: float  # mean training loss just before
    after: float  # and at the end
    apart: float  # largest difference between the survivors' models after finish()
    named: bool  # all survivors say who was lost, and from when on they went on


def lose(seed: int) -> Loss:
    """Kill one of the workers at a step that depends on the seed."""
    dice = random.Random(seed)
    victim, fatal = dice.randrange(WORKERS), dice.randrange(20, STEPS // 2)
    algorithm = "sgp(overlap=1, on_loss='continue')"
    said = run(WORKERS, algorithm, STEPS, victim, fatal, seed, expected=128 + signal.SIGKILL)
    assert sorted(said) == [rank for rank in range(WORKERS) if rank != victim]
    losses = np.mean([worker["losses"] for worker in said.values()], axis=0)
    models = np.array([worker["model"] for worker in said.values()])
    lost = [worker["lost"] for worker in said.values()]
    return Loss(
        seed,
        victim,
        fatal,
        max(float(np.diff(worker["times"]).max()) for worker in said.values()),
        float(losses[fatal - NEAR : fatal].mean()),
        float(losses[-NEAR:].mean()),
        float(np.ptp(models, axis=0).max()),
        all(each == lost[0] and [loss["rank"] for loss in each] == [victim] for each in lost),
    )


def show(losses: Sequence[Loss]) -> None:
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
        Claim("all others train to the end, name the lost rank and are equal after finish()",
              "every run", f"{equal} of {len(losses)}", equal == len(losses)),
        Claim("training goes on within 30 s of the loss", "every run", f"{longest:.1f} s at most",
              longest < 30),
        Claim("the loss goes on falling", "every run", f"{falling} of {len(losses)}",
              falling == len(losses)),
    ]  # fmt: skip
    headings = ("seed", "killed", "s until training went on", "loss before", "at the end", "equal")
    title = f"One of {WORKERS} workers killed, {STEPS} steps, {RATE}"
    report("sgp_loss", title, headings, rows, claims, losses=[*map(asdict, losses)])


@app.command(epilog=EPILOG)
def main(
    seeds: Annotated[int, typer.Option(help="Runs with a killed rank, 25 s each.")] = 10,
) -> None:
    """Kill a rank in every run, and see how the others go on."""
    show([lose(seed) for seed in track(range(seeds), "killing ranks", console=console)])


if __name__ == "__main__":
    app()
