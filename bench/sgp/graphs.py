"""Accuracy and time of SGP by graph and schedule (Table 3 of the paper).

One peer, two peers, and hybrids whose first third is an all-reduce or has two peers. Accuracy is
that of virtual workers on MNIST-1D; the time of a hybrid is computed from those of its phases.

Time is measured twice: on slow links alone, and on faster ones between workers that compute
unevenly, for times with an exponential distribution, the usual model of stragglers.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean, stdev
from typing import Annotated, Any

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
from offbeat import Complete, Exponential, Phases, Topology

STEPS, UNEVEN_STEPS = 20, 40  # that are timed
COMPUTE, UNEVEN_RATE = 0.1, "250mbit"  # mean s a step; the model takes 0.014 s
PAPER = {  # accuracy in %, hours
    16: {"AR-SGD": (76.3, 8.5), "2P-SGP": (76.2, 5.1), "1P-SGP": (75.9, 3.2),
         "AR/1P-SGP": (76.2, 4.8), "2P/1P-SGP": (76.0, 3.5)},
    32: {"AR-SGD": (76.2, 5.2), "2P-SGP": (75.7, 2.5), "1P-SGP": (75.0, 1.7),
         "AR/1P-SGP": (75.4, 2.8), "2P/1P-SGP": (75.1, 1.8)},
}  # fmt: skip
PURE = {"AR-SGD": offbeat.ddp(), "2P-SGP": offbeat.sgp(peers=2), "1P-SGP": offbeat.sgp()}
EARLY: dict[str, Topology] = {"AR": Complete(), "2P": Exponential(2)}
NAMES = tuple(PAPER[16])
BENCH = Bench(
    name="sgp/graphs",
    claim="More peers are more accurate (Table 3)",
    minutes=10,
    full_minutes=16,
    evidence={"Table 3": "More peers, at least early, are slower and more accurate"},
)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
Accuracies = Mapping[str, list[float]]  # in %, by method; one for each seed
Times = dict[str, float]  # seconds of a step, by method


def method(name: str, steps: int) -> offbeat.Algorithm:
    """One of the five of the table; hybrids change their graph after a third of the steps."""
    if name in PURE:
        return PURE[name]
    early = EARLY[name.split("/")[0]]
    return offbeat.sgp(Phases(((steps // 3, early), (None, Exponential()))))


def times(nodes: int, rate: str, steps: int, runs: int, compute: float = 0.0) -> list[Times]:
    """Seconds of a step on emulated nodes, one for each run; workers compute unevenly, if at all.

    A third of a hybrid's steps takes as long as in its first phase, the others as in 1P-SGP.
    """
    cases = [
        Timed(name, each, nodes, BATCH * nodes * steps, run, compute=compute, uneven=True)
        for run in range(runs)
        for name, each in PURE.items()
    ]
    found: list[Times] = [{} for _ in range(runs)]
    for case, outcome in zip(cases, in_lab(cases, rate), strict=True):
        found[case.seed][case.name] = outcome.seconds
    for seconds in found:
        for name, early in (("AR", "AR-SGD"), ("2P", "2P-SGP")):
            seconds[f"{name}/1P-SGP"] = seconds[early] / 3 + seconds["1P-SGP"] * 2 / 3
    return found


def faster(runs: Sequence[Times], name: str) -> Effect:
    """How much faster than an all-reduce."""
    return Effect.mean([seconds["AR-SGD"] / seconds[name] for seconds in runs], "x")


def accuracies(world: int, seeds: int) -> Accuracies:
    """In %, of all methods."""
    return {
        name: [
            train(Case(name, partial(method, name), world, seed, sgp_schedule)).heldout
            for seed in range(seeds)
        ]
        for name in NAMES
    }


def accuracy_claims(world: int, found: Accuracies) -> list[Claim]:
    base, made = "1P-SGP", []
    for name in NAMES:
        if name != base:
            paper = PAPER[world][name][0] - PAPER[world][base][0]
            ours = [a - b for a, b in zip(found[name], found[base], strict=True)]
            text = f"{world} workers: {name} is more accurate than {base}"
            made.append(Claim.effect(text, Effect(paper), Effect.mean(ours)))
    return made


def time_claims(uneven: Sequence[Times]) -> list[Claim]:
    base, made = "AR-SGD", []
    for name in ("1P-SGP", "2P-SGP"):
        paper = Effect(PAPER[16][base][1] / PAPER[16][name][1], "x")
        text = f"{name} is faster than {base} between workers that compute unevenly"
        made.append(Claim.effect(text, paper, faster(uneven, name)))
    return made


@app.command(epilog=BENCH.examples("--full"))
def main(
    full: Annotated[bool, typer.Option("--full", help="Twice the seeds.")] = False,
    seeds: Annotated[int, typer.Option(min=2, help="Runs of each method.")] = 15,
    nodes: Annotated[int, typer.Option(help="Nodes with slow links.")] = 8,
    runs: Annotated[int, typer.Option(min=2, help="Runs that are timed.")] = 5,
) -> None:
    """Compare one peer, two peers and hybrids with 16 and with 32 workers."""
    console.print(f"time on {nodes} nodes, {RATE}, and on 16, {UNEVEN_RATE}, that compute unevenly")
    rows, judged = [], []
    even = times(nodes, RATE, STEPS, runs)
    uneven = times(16, UNEVEN_RATE, UNEVEN_STEPS, runs, COMPUTE)
    measured: dict[Any, Any] = {"seconds": even, "uneven": uneven}
    for world, paper in PAPER.items():
        found = measured[world] = accuracies(world, seeds * (2 if full else 1))
        judged += accuracy_claims(world, found)
        for name, (accuracy, hours) in paper.items():
            ours = f"{fmean(found[name]):.1f} ± {stdev(found[name]):.1f}%"
            theirs = f"{paper['AR-SGD'][1] / hours:.2f}"
            factors = [f"{faster(each, name).size:.2f}" for each in (even, uneven)]
            rows.append((f"{world}", name, f"{accuracy}%", ours, theirs, *factors))
    headings = ("workers", "method", "paper", "ours", "paper, x AR", "ours, x AR", "uneven, x AR")
    title = f"Table 3: accuracy, and how much faster than all-reduce ({RATE})"
    judged += time_claims(uneven)
    report(BENCH, title, headings, rows, judged, measured=measured)


if __name__ == "__main__":
    app()
