"""Recovery of SGP from a lost rank: duration and effect on training.

One of 8 workers is killed with SIGKILL at a random step. Needs root.
"""

import random
import signal
from dataclasses import dataclass

import numpy as np

from bench.harness.bench import Bench
from bench.harness.claim import Claim
from bench.harness.command import Result, command
from bench.sgp.regression import RATE, run

WORKERS, STEPS = 8, 150
NEAR = 20  # steps over which a loss is averaged
SOON = 30.0  # s
HEADINGS = ("seed", "killed", "s until training went on", "loss before", "at the end", "equal")
BENCH = Bench(
    name="sgp/loss",
    claim="Training continues after a rank is killed",
    minutes=5,
)


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

    @property
    def is_equal(self) -> bool:
        return self.named and self.apart == 0

    @property
    def row(self) -> tuple[str, ...]:
        losses = f"{self.before:.4f}", f"{self.after:.4f}"
        equal = "yes" if self.is_equal else "NO"
        killed = f"rank {self.rank} at {self.step}"
        return f"{self.seed}", killed, f"{self.seconds:.1f}", *losses, equal


def measure(seed: int) -> Recovery:
    """Kill one of the workers at a step that depends on the seed."""
    dice = random.Random(seed)
    victim, fatal = dice.randrange(WORKERS), dice.randrange(20, STEPS // 2)
    algorithm = "sgp(overlap=1)"
    printed = run(WORKERS, algorithm, STEPS, victim, fatal, seed, expected=128 + signal.SIGKILL)
    assert sorted(printed) == [rank for rank in range(WORKERS) if rank != victim]
    losses = np.mean([worker["losses"] for worker in printed.values()], axis=0)
    models = np.array([worker["model"] for worker in printed.values()])
    lost = [worker["lost"] for worker in printed.values()]
    return Recovery(
        seed,
        victim,
        fatal,
        seconds=max(float(np.diff(worker["times"]).max()) for worker in printed.values()),
        before=float(losses[fatal - NEAR : fatal].mean()),
        after=float(losses[-NEAR:].mean()),
        apart=float(np.ptp(models, axis=0).max()),
        named=all(each == lost[0] and [one["rank"] for one in each] == [victim] for each in lost),
    )


def claims(found: list[Recovery]) -> list[Claim]:
    longest = max(each.seconds for each in found)
    equal = sum(each.is_equal for each in found)
    falling = sum(each.after < each.before for each in found)
    return [
        Claim("survivors train to the end, report the lost rank and are equal after finish()",
              "every run", f"{equal} of {len(found)}", equal == len(found)),
        Claim(f"training continues within {SOON:g} s of the loss", "every run",
              f"{longest:.1f} s at most", longest < SOON),
        Claim("the loss keeps falling", "every run", f"{falling} of {len(found)}",
              falling == len(found)),
    ]  # fmt: skip


@command(BENCH, "--seeds 3", seeds="Runs with a killed rank, 25 s each.")
def app(seeds: int = 10) -> Result:
    """Kill a rank in every run and measure the recovery of the others."""
    found = [measure(seed) for seed in range(seeds)]
    title = f"One of {WORKERS} workers killed, {STEPS} steps, {RATE}"
    return Result(title, HEADINGS, [each.row for each in found], claims(found), measured=found)


if __name__ == "__main__":
    app()
