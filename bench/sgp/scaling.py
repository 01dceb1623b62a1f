"""Time and accuracy of SGP as nodes are added (Table 1, Figure 1 of the paper).

All-reduce, D-PSGD and SGP, the latter two with one peer. The number of samples is the same for
all world sizes, so that more workers take fewer steps. Accuracy is that of virtual workers on
MNIST-1D.
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

AR, PAIRS, SGP = "AR-SGD", "D-PSGD", "SGP"
METHODS = {AR: offbeat.ddp(), PAIRS: offbeat.d_psgd("bipartite"), SGP: offbeat.sgp()}
ALONE = "compute only"
PAPER = {  # accuracy in %, hours
    4: {AR: (76.2, 22.0), PAIRS: (76.4, 19.7), SGP: (76.3, 11.8)},
    8: {AR: (76.4, 14.0), PAIRS: (76.1, 9.7), SGP: (76.4, 5.9)},
    16: {AR: (76.3, 8.5), PAIRS: (75.9, 5.0), SGP: (75.9, 3.2)},
    32: {AR: (76.2, 5.1), PAIRS: (74.4, 2.6), SGP: (75.0, 1.7)},
}
STEPS = 20  # that are timed
MANY = (16, 32)  # workers with which the paper's accuracies are no longer the same
NEAR = 1.0  # % that do not count
HEADINGS = ("workers", "method", "paper", "ours", "paper, x AR", "ours, x AR", "a step")
BENCH = Bench(
    name="sgp/scaling",
    claim="SGP is faster at every size (Table 1, Fig. 1)",
    minutes=6,
    full_minutes=12,
    evidence={
        "Table 1, Fig. 1": "Faster than all-reduce and D-PSGD; less accurate with many nodes"
    },
)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
Times = dict[int, dict[str, float]]  # seconds of a step
Accuracies = dict[int, dict[str, list[float]]]  # in %, one for each seed


def times(nodes: int) -> dict[str, float]:
    """Seconds of a step on emulated nodes."""
    methods = METHODS | {ALONE: offbeat.alone()}
    cases = [Timed(name, each, nodes, BATCH * nodes * STEPS) for name, each in methods.items()]
    return {c.name: o.seconds for c, o in zip(cases, in_lab(cases), strict=True)}


def accuracies(world: int, seeds: int) -> dict[str, list[float]]:
    """In %, of all methods."""

    def heldout(name: str, seed: int) -> float:
        return train(Case(name, lambda _: METHODS[name], world, seed, sgp_schedule)).heldout

    return {name: [heldout(name, seed) for seed in range(seeds)] for name in METHODS}


def rows(seconds: Times, found: Accuracies) -> list[tuple[str, ...]]:
    lines = []
    for world, by_method in found.items():
        for name, runs in by_method.items():
            accuracy, hours = PAPER[world][name]
            ours = f"{fmean(runs):.1f} ± {stdev(runs):.1f}%"
            line = [f"{world}", name, f"{accuracy}%", ours, f"{PAPER[world][AR][1] / hours:.2f}"]
            if timed := seconds.get(world):
                line += [f"{timed[AR] / timed[name]:.2f}", f"{timed[name] * 1e3:.0f} ms"]
            lines.append((*line, "", "")[: len(HEADINGS)])
        if world in seconds:
            step = f"{seconds[world][ALONE] * 1e3:.0f} ms"
            lines.append((f"{world}", ALONE, "", "", "", "", step))
    return lines


def time_claims(seconds: Times) -> list[Claim]:
    made, few, many = [], min(seconds), max(seconds)
    for nodes, timed in seconds.items():
        for other in (AR, PAIRS):
            paper = PAPER[nodes][other][1] / PAPER[nodes][SGP][1]
            text = f"{nodes} nodes: SGP is faster than {other}"
            ours = timed[other] / timed[SGP]
            made.append(Claim.effect(text, Effect(paper, "x"), Effect(ours, "x")))
    growth = {name: seconds[many][name] / seconds[few][name] for name in METHODS}
    ours = ", ".join(f"{name} {factor:.2f}" for name, factor in growth.items())
    text = f"a step of SGP grows less than one of AR, {few} to {many} nodes"
    paper = "AR 1.55, D-PSGD 1.02, SGP 1.08"
    return [*made, Claim(text, paper, ours, growth[SGP] < growth[AR])]


def accuracy_claims(found: Accuracies) -> list[Claim]:
    made = []
    for world, by_method in found.items():
        for name in (PAIRS, SGP):
            paper = Effect(PAPER[world][name][0] - PAPER[world][AR][0])
            runs = zip(by_method[name], by_method[AR], strict=True)
            ours = Effect.mean([a - b for a, b in runs])
            if world in MANY:
                text = f"{world} workers: {name} is less accurate than {AR}"
                made.append(Claim.effect(text, paper, ours))
            else:
                text = f"{world} workers: {name} is about as accurate as {AR}"
                made.append(Claim(text, str(paper), str(ours), abs(ours.size) < NEAR))
    return made


@app.command(epilog=BENCH.examples("--full"))
def main(
    full: Annotated[bool, typer.Option("--full", help="Twice the seeds.")] = False,
    nodes: Annotated[str, typer.Option(help="Nodes of the lab: 4, 8, 16.")] = "4,8,16",
    seeds: Annotated[int, typer.Option(min=2, help="Runs of each method.")] = 5,
) -> None:
    """Compare all-reduce, D-PSGD and SGP with 4 to 32 workers."""
    console.print(f"time: one process per emulated node, {RATE}; accuracy: virtual workers")
    seconds = {count: times(count) for count in map(int, nodes.split(","))}
    found = {world: accuracies(world, seeds * (2 if full else 1)) for world in PAPER}
    title = f"Table 1: accuracy, and how much faster than all-reduce ({RATE})"
    judged = [*time_claims(seconds), *accuracy_claims(found)]
    measured = {"seconds": seconds, "accuracy": found}
    report(BENCH, title, HEADINGS, rows(seconds, found), judged, measured=measured)


if __name__ == "__main__":
    app()
