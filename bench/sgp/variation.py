"""Variation of time and accuracy over runs with stragglers (Table 2 of the SGP paper).

Links are not limited, and a step's computation is a pause, as on an accelerator; in one step of
fifty a worker stalls.
"""

from dataclasses import replace
from statistics import fmean, stdev

import offbeat
from bench.harness import NEAR, Bench, Claim, Effect, Result, command
from bench.harness.case import Pause
from bench.harness.seeds import Runs, in_lab
from bench.sgp.task import DIGITS, digits_case

METHODS = {"AR-SGD": offbeat.ddp(), "SGP": offbeat.sgp(), "1-OSGP": offbeat.sgp(overlap=1)}
PAPER = {
    (4, "AR-SGD"): "76.3 ± 0.2%  8.8 ± 0.4 h",
    (4, "SGP"): "76.3 ± 0.2%  8.2 ± 0.1 h",
    (16, "AR-SGD"): "76.2 ± 0.2%  2.5 ± 0.3 h",
    (16, "SGP"): "75.8 ± 0.2%  2.2 ± 0.1 h",
}
LESS = {4: (7.0, "5 % against 1 %"), 16: (12.0, "12 % against 5 %")}  # time; its deviations
COMPUTE = 0.05  # s a step
BENCH = Bench(
    name="sgp/variation",
    claim="With stragglers SGP varies less (Table 2)",
    minutes=4,
    full_minutes=14,
    evidence={"Table 2": "With stragglers, faster and with less variation, as accurate"},
)


def measure(world: int, samples: int, seeds: int, pause: Pause) -> dict[str, Runs]:
    """Accuracies in % and seconds of training."""
    steps = DIGITS.steps(samples, world)
    cases = [
        replace(digits_case(name, method, world, steps, pause), seed=seed)
        for seed in range(seeds)
        for name, method in METHODS.items()
    ]
    outcomes = in_lab(cases, rate=None)
    found = {}
    for index, name in enumerate(METHODS):
        runs = outcomes[index :: len(METHODS)]
        found[name] = Runs.of(runs)
        found[name]["seconds"] = [steps * run.seconds for run in runs]
    return found


def plus_minus(values: list[float]) -> str:
    return f"{fmean(values):.1f} ± {stdev(values):.2f}"


def claims(world: int, ar: Runs, sgp: Runs) -> list[Claim]:
    pairs = zip(ar["seconds"], sgp["seconds"], strict=True)
    saved = Effect.mean([100 * (1 - ours / theirs) for theirs, ours in pairs])
    relative = [100 * stdev(each["seconds"]) / fmean(each["seconds"]) for each in (ar, sgp)]
    accuracy = sgp.over(ar)
    less, varies = LESS[world]
    return [
        Claim.effect(f"{world} nodes: SGP takes less time on a fast network", Effect(less), saved),
        Claim(f"{world} nodes: the time of SGP varies less, AR against SGP", varies,
              f"{relative[0]:.1f} % against {relative[1]:.1f} %", relative[1] < relative[0]),
        Claim(f"{world} nodes: the accuracies are about the same", "0.0 - 0.4 % apart",
              str(accuracy), abs(accuracy.size) < NEAR),
    ]  # fmt: skip


@command(
    BENCH, "--full", full="With 4 nodes too.", samples="Images seen by all workers.",
    stall="Seconds that a stall lasts.",
)  # fmt: skip
def app(full: bool = False, seeds: int = 20, samples: int = 15_360, stall: float = 0.1) -> Result:
    """Train many times with all-reduce and with SGP, with a worker that stalls at times."""
    rows, judged, measured = [], [], []
    for world in (16, 4) if full else (16,):
        found = measure(world, samples, seeds, Pause(COMPUTE, stall=stall))
        judged += claims(world, found["AR-SGD"], found["SGP"])
        for name, runs in found.items():
            ours = f"{plus_minus(runs['heldout'])}%  {plus_minus(runs['seconds'])} s"
            rows.append((f"{world}", name, PAPER.get((world, name), "-"), ours))
            measured.append({"world": world, "method": name, **runs})
    title = f"Table 2: mean ± standard deviation of {seeds} runs"
    return Result(title, ("nodes", "method", "paper", "ours"), rows, judged, measured=measured)
