"""Variation of time and accuracy over runs with stragglers (Table 2 of the SGP paper).

Links are not limited, and a step's computation is a pause, as on an accelerator; in one step of
fifty a worker stalls.
"""

from statistics import fmean, stdev
from typing import Annotated

import typer

import offbeat
from bench.harness.bench import Bench
from bench.harness.claim import Claim
from bench.harness.console import console
from bench.harness.effect import Effect
from bench.harness.report import report
from bench.sgp.task import Case
from bench.sgp.timing import in_lab

METHODS = {"AR-SGD": offbeat.ddp(), "SGP": offbeat.sgp()}
EXTRA = {"1-OSGP": offbeat.sgp(overlap=1)}  # not in the paper's table
PAPER = {
    (4, "AR-SGD"): "76.3 ± 0.2%  8.8 ± 0.4 h",
    (4, "SGP"): "76.3 ± 0.2%  8.2 ± 0.1 h",
    (16, "AR-SGD"): "76.2 ± 0.2%  2.5 ± 0.3 h",
    (16, "SGP"): "75.8 ± 0.2%  2.2 ± 0.1 h",
}
COMPUTE = 0.05  # s a step
BENCH = Bench(
    name="sgp/variation",
    claim="With stragglers SGP varies less (Table 2)",
    minutes=4,
    full_minutes=14,
    evidence={"Table 2": "With stragglers, faster and with less variation, as accurate"},
)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
Found = dict[tuple[int, str], dict[str, list[float]]]


def measure(world: int, samples: int, seeds: int, stall: float) -> Found:
    """Accuracies in % and seconds of training, by method, one for each seed."""
    methods = METHODS | EXTRA
    cases = [
        Case(name, method, world, samples, seed, stall, COMPUTE)
        for seed in range(seeds)
        for name, method in methods.items()
    ]
    found: Found = {(world, name): {"accuracy": [], "seconds": []} for name in methods}
    for case, outcome in zip(cases, in_lab(cases, rate=None), strict=True):
        found[world, case.name]["accuracy"].append(100 * outcome.heldout)
        found[world, case.name]["seconds"].append(outcome.seconds * case.steps)
    return found


def plus_minus(values: list[float]) -> str:
    return f"{fmean(values):.1f} ± {stdev(values):.2f}"


def claims(found: Found, world: int) -> list[Claim]:
    ar, sgp = (found[world, name] for name in METHODS)
    times = zip(ar["seconds"], sgp["seconds"], strict=True)
    saved = Effect.mean([100 * (1 - ours / theirs) for theirs, ours in times])
    relative = [100 * stdev(each["seconds"]) / fmean(each["seconds"]) for each in (ar, sgp)]
    runs = zip(sgp["accuracy"], ar["accuracy"], strict=True)
    accuracy = Effect.mean([a - b for a, b in runs])
    less, varies = {4: (7.0, "5 % against 1 %"), 16: (12.0, "12 % against 5 %")}[world]
    return [
        Claim.effect(f"{world} nodes: SGP takes less time on a fast network", Effect(less), saved),
        Claim(f"{world} nodes: the time of SGP varies less, AR against SGP", varies,
              f"{relative[0]:.1f} % against {relative[1]:.1f} %", relative[1] < relative[0]),
        Claim(f"{world} nodes: the accuracies are about the same", "0.0 - 0.4 % apart",
              str(accuracy), abs(accuracy.size) < 1.0),
    ]  # fmt: skip


@app.command(epilog=BENCH.examples("--full"))
def main(
    full: Annotated[bool, typer.Option("--full", help="With 4 nodes too.")] = False,
    seeds: Annotated[int, typer.Option(min=2, help="Runs of each method.")] = 20,
    samples: Annotated[int, typer.Option(help="Images seen by all workers together.")] = 15_360,
    stall: Annotated[float, typer.Option(help="Seconds a stall lasts.")] = 0.1,
) -> None:
    """Train many times with all-reduce and with SGP, with a worker that stalls at times."""
    found: Found = {}
    worlds = (16, 4) if full else (16,)
    for world in worlds:
        console.print(f"{world} nodes, each late by {stall} s in one step of fifty")
        found |= measure(world, samples, seeds, stall)
    rows = [
        (f"{world}", name, PAPER.get((world, name), "-"),
         f"{plus_minus(each['accuracy'])}%  {plus_minus(each['seconds'])} s")
        for (world, name), each in found.items()
    ]  # fmt: skip
    title = f"Table 2: mean ± standard deviation of {seeds} runs"
    judged = [claim for world in worlds for claim in claims(found, world)]
    runs = [{"world": w, "method": n, **each} for (w, n), each in found.items()]
    report(BENCH, title, ("nodes", "method", "paper", "ours"), rows, judged, measured=runs)


if __name__ == "__main__":
    app()
