"""Accuracy and time of SGP by graph and schedule (Table 3 of the paper).

One peer, two peers, and hybrids whose first third is an all-reduce or has two peers. The time of
a hybrid is computed from the times of its phases.
"""

from typing import Annotated

import numpy as np
import typer

import offbeat
from bench.harness.bench import Bench
from bench.harness.claim import Claim
from bench.harness.console import console
from bench.harness.report import report
from bench.sgp.task import BATCH, Case, in_threads
from bench.sgp.timing import RATE, in_lab
from offbeat import Complete, Exponential, Phases, Topology

STEPS = 10  # that are timed
PAPER = {  # accuracy in %, hours
    16: {"AR-SGD": (76.3, 8.5), "2P-SGP": (76.2, 5.1), "1P-SGP": (75.9, 3.2),
         "AR/1P-SGP": (76.2, 4.8), "2P/1P-SGP": (76.0, 3.5)},
    32: {"AR-SGD": (76.2, 5.2), "2P-SGP": (75.7, 2.5), "1P-SGP": (75.0, 1.7),
         "AR/1P-SGP": (75.4, 2.8), "2P/1P-SGP": (75.1, 1.8)},
}  # fmt: skip
PURE = {"AR-SGD": offbeat.ddp(), "2P-SGP": offbeat.sgp(peers=2), "1P-SGP": offbeat.sgp()}
EARLY: dict[str, Topology] = {"AR": Complete(), "2P": Exponential(2)}
BENCH = Bench(
    name="sgp/graphs",
    claim="More peers are more accurate (Table 3)",
    minutes=5,
    full_minutes=30,
    evidence={"Table 3": "More peers, at least early, are slower and more accurate"},
)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
Found = dict[str, dict[str, float]]


def methods(steps: int) -> dict[str, offbeat.Algorithm]:
    """The five of the table; hybrids change their graph after a third of the steps."""
    hybrids = {
        f"{name}/1P-SGP": offbeat.sgp(Phases(((steps // 3, early), (None, Exponential()))))
        for name, early in EARLY.items()
    }
    return PURE | hybrids


def measure(world: int, timed: int, samples: int, seeds: int) -> Found:
    """Accuracy in %, its deviation over seeds, and seconds per step."""
    cases = [Case(name, method, timed, BATCH * timed * STEPS) for name, method in PURE.items()]
    seconds = {c.name: o.seconds for c, o in zip(cases, in_lab(cases), strict=True)}
    for name, early in (("AR", "AR-SGD"), ("2P", "2P-SGP")):
        seconds[f"{name}/1P-SGP"] = seconds[early] / 3 + seconds["1P-SGP"] * 2 / 3
    found: Found = {}
    for name, method in methods(samples // (BATCH * world)).items():
        runs = [in_threads(Case(name, method, world, samples, seed)) for seed in range(seeds)]
        accuracy = [100 * run.heldout for run in runs]
        found[name] = {"accuracy": float(np.mean(accuracy)), "deviation": float(np.std(accuracy)),
                       "seconds": seconds[name]}  # fmt: skip
    return found


def claims(world: int, found: Found) -> list[Claim]:
    paper = {name: accuracy for name, (accuracy, _) in PAPER[world].items()}
    ours = {name: each["accuracy"] for name, each in found.items()}
    noise = max(each["deviation"] for each in found.values())

    def better(name: str, than: str = "1P-SGP") -> Claim:
        gains = [f"{figures[name] - figures[than]:+.1f} %" for figures in (paper, ours)]
        text = f"{world} nodes: {name} is more accurate than {than}"
        figure = f"{gains[1]}, standard deviation {noise:.1f} %"
        return Claim(text, gains[0], figure, ours[name] > ours[than] + noise / 2)

    order = ["AR-SGD", "2P-SGP", "AR/1P-SGP", "2P/1P-SGP", "1P-SGP"]
    times = [found[name]["seconds"] for name in order]
    hours = [f"{PAPER[world][name][1]}" for name in order]
    fewer = Claim(
        f"{world} nodes: time falls from AR to 1P",
        f"{', '.join(hours)} h", f"{', '.join(f'{t * 1e3:.0f}' for t in times)} ms a step",
        times[0] > times[1] > times[-1],
    )  # fmt: skip
    return [fewer, *(better(name) for name in ("2P-SGP", "AR/1P-SGP", "2P/1P-SGP"))]


@app.command(epilog=BENCH.examples("--full"))
def main(
    full: Annotated[bool, typer.Option("--full", help="With 32 workers too, 5 seeds.")] = False,
    seeds: Annotated[int, typer.Option(help="Runs of each method.")] = 2,
    samples: Annotated[int, typer.Option(help="Images seen by all workers together.")] = 20_000,
    nodes: Annotated[int, typer.Option(help="Nodes of the lab.")] = 8,
) -> None:
    """Compare one peer, two peers and hybrids with 16 workers."""
    rows, judged, measured = [], [], {}
    for world in (16, 32) if full else (16,):
        console.print(f"accuracy with {world} workers; time on {nodes} nodes, {RATE}")
        found = measured[world] = measure(world, nodes, samples, 5 if full else seeds)
        for name, each in found.items():
            accuracy, hours = PAPER[world][name]
            faster = [PAPER[world]["AR-SGD"][1] / hours,
                      found["AR-SGD"]["seconds"] / each["seconds"]]  # fmt: skip
            ours = f"{each['accuracy']:.1f} ± {each['deviation']:.1f}%"
            times = [f"{factor:.2f}" for factor in faster]
            rows.append((f"{world}", name, f"{accuracy}%", ours, *times))
        judged += claims(world, found)
    headings = ("workers", "method", "paper", "ours", "paper, x AR", "ours, x AR")
    title = f"Table 3: accuracy, and how much faster than all-reduce ({RATE})"
    report(BENCH, title, headings, rows, judged, measured=measured)


if __name__ == "__main__":
    app()
