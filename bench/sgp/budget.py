"""Accuracy of SGP in the time that all-reduce needs (Table 5 of the paper).

A step of each method is timed on emulated nodes, with a pause for computation, as on an
accelerator; virtual workers then take as many steps as fit, on MNIST-1D.
"""

from statistics import fmean, stdev
from typing import Annotated

import typer

import offbeat
from bench.harness.bench import Bench
from bench.harness.claim import Claim
from bench.harness.console import console
from bench.harness.effect import Effect
from bench.harness.mnist1d_task import Case, sgp_schedule, train
from bench.harness.report import report
from bench.sgp.task import BATCH
from bench.sgp.task import Case as Timed
from bench.sgp.timing import RATE, in_lab

METHODS = {"AR-SGD": offbeat.ddp(), "SGP": offbeat.sgp(), "1-OSGP": offbeat.sgp(overlap=1)}
PAPER = {  # accuracies in training and validation in %, hours, epochs
    "AR-SGD": (76.9, 76.2, 5.1, 90),
    "SGP": (80.0, 77.1, 4.6, 270),
    "1-OSGP": (81.8, 77.1, 2.7, 270),
}
STEPS = 20  # that are timed
COMPUTE = 0.1  # s, beside 0.144 s for a model on the link
BENCH = Bench(
    name="sgp/budget",
    claim="SGP beats all-reduce in equal time (Table 5)",
    minutes=5,
    full_minutes=12,
    evidence={"Table 5": "More accurate than all-reduce in the same time"},
)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
Found = dict[str, dict[str, list[float]]]  # by method


def measure(world: int, nodes: int, passes: float, seeds: int) -> Found:
    """Seconds of a step; accuracies in % after as many steps as fit, one for each seed."""
    cases = [
        Timed(name, method, nodes, BATCH * nodes * STEPS, compute=COMPUTE)
        for name, method in METHODS.items()
    ]
    seconds = {c.name: o.seconds for c, o in zip(cases, in_lab(cases), strict=True)}
    found: Found = {}
    for name in METHODS:
        fit = seconds["AR-SGD"] / seconds[name]
        runs = [train(case(name, world, seed, passes * fit)) for seed in range(seeds)]
        found[name] = {
            "seconds": [seconds[name]],
            "fit": [fit],
            "train": [run.train for run in runs],
            "heldout": [run.heldout for run in runs],
        }
    return found


def case(name: str, world: int, seed: int, passes: float) -> Case:
    return Case(name, lambda _: METHODS[name], world, seed, sgp_schedule, passes=passes)


def claims(found: Found) -> list[Claim]:
    base, made = "AR-SGD", []
    for name in list(found)[1:]:
        for column, (kind, where) in enumerate((("train", "in training"), ("heldout", "held out"))):
            paper = Effect(PAPER[name][column] - PAPER[base][column])
            pairs = zip(found[name][kind], found[base][kind], strict=True)
            text = f"in equal time {name} is more accurate than all-reduce {where}"
            made.append(Claim.effect(text, paper, Effect.mean([a - b for a, b in pairs])))
    return made


@app.command(epilog=BENCH.examples("--full"))
def main(
    full: Annotated[bool, typer.Option("--full", help="Twice the seeds.")] = False,
    world: Annotated[int, typer.Option(help="Virtual workers; the paper had 32 nodes.")] = 8,
    nodes: Annotated[int, typer.Option(help="Nodes of the lab.")] = 8,
    seeds: Annotated[int, typer.Option(min=2, help="Runs of each method.")] = 5,
    passes: Annotated[float, typer.Option(help="Of all-reduce over the data.")] = 20.0,
) -> None:
    """Give SGP and overlap SGP the time that all-reduce needs."""
    console.print(
        f"accuracy with {world} workers; time on {nodes} emulated nodes, {RATE}, "
        f"{COMPUTE * 1e3:g} ms of computation per step"
    )
    found = measure(world, nodes, passes, seeds * (2 if full else 1))
    rows = []
    for name, ours in found.items():
        train, heldout, hours, epochs = PAPER[name]
        spread = stdev(ours["heldout"])
        accuracy = f"{fmean(ours['train']):.1f} / {fmean(ours['heldout']):.1f} ± {spread:.1f}%"
        paper = f"{train} / {heldout}%  {hours} h"
        rows.append((name, paper, accuracy, f"{epochs / 90:.1f}", f"{ours['fit'][0]:.2f}"))
    headings = ("method", "paper, train / val", "ours", "paper, x steps", "ours, x steps")
    title = f"Table 5: in the time of all-reduce, {RATE}"
    report(BENCH, title, headings, rows, claims(found), measured=found)


if __name__ == "__main__":
    app()
