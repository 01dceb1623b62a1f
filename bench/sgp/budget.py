"""Accuracy of SGP in the time that all-reduce needs (Table 5 of the paper).

A step of each method is timed on emulated nodes; each then takes as many steps as fit.
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
from bench.sgp.task import BATCH, Case, in_threads
from bench.sgp.timing import RATE, in_lab

METHODS = {
    "AR-SGD": offbeat.ddp(),
    "SGP": offbeat.sgp(),
    "1-OSGP": offbeat.sgp(overlap=1),
    "AD-PSGD": offbeat.ad_psgd(),
}
PAPER = {  # accuracies in training and validation in %, hours, epochs
    "AR-SGD": (76.9, 76.2, 5.1, 90),
    "AD-PSGD": (80.3, 76.9, 4.7, 270),
    "SGP": (80.0, 77.1, 4.6, 270),
    "1-OSGP": (81.8, 77.1, 2.7, 270),
}
STEPS = 10  # that are timed
BENCH = Bench(
    name="sgp/budget",
    claim="SGP beats all-reduce in equal time (Table 5)",
    minutes=5,
    full_minutes=12,
    evidence={"Table 5": "More accurate than all-reduce in the same time"},
)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
Found = dict[str, dict[str, list[float]]]  # by method


def measure(world: int, nodes: int, samples: int, seeds: int) -> Found:
    """Seconds of a step; accuracies in % after as many steps as fit, one for each seed."""
    cases = [Case(name, method, nodes, BATCH * nodes * STEPS) for name, method in METHODS.items()]
    seconds = {c.name: o.seconds for c, o in zip(cases, in_lab(cases), strict=True)}
    found: Found = {}
    for name, method in METHODS.items():
        fit = seconds["AR-SGD"] / seconds[name]
        count = round(samples * fit)
        runs = [in_threads(Case(name, method, world, count, seed)) for seed in range(seeds)]
        found[name] = {
            "seconds": [seconds[name]],
            "fit": [fit],
            "train": [100 * run.train for run in runs],
            "heldout": [100 * run.heldout for run in runs],
        }
    return found


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
    world: Annotated[int, typer.Option(help="Virtual workers; the paper had 32 nodes.")] = 16,
    nodes: Annotated[int, typer.Option(help="Nodes of the lab.")] = 8,
    seeds: Annotated[int, typer.Option(min=2, help="Runs of each method.")] = 5,
    samples: Annotated[int, typer.Option(help="Images that all-reduce trains on.")] = 12_000,
) -> None:
    """Give SGP and overlap SGP the time that all-reduce needs."""
    console.print(f"accuracy with {world} workers; time on {nodes} emulated nodes, {RATE}")
    found = measure(world, nodes, samples, seeds * (2 if full else 1))
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
