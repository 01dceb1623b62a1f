"""Seconds per step of SGP on nodes with two ranks each, by the hierarchy of the exchange.

Between ranks of any node, every second exchange sends both models of a node over its link.
``within="local"`` averages gradients inside a node and sends one model.
"""

from typing import Annotated

import typer

from bench.harness.bench import Bench
from bench.harness.claim import Claim
from bench.harness.comparison import compare, figures, middle, seconds
from bench.harness.files import EXAMPLES
from bench.harness.report import report
from bench.harness.table import Row
from offbeat.compare import Comparison, Experiment, parse_methods
from offbeat.kit.quantity import size

NODES, RANKS = 2, 2
FLAT, LOCAL = "sgp", "sgp(within='local')"
ALGORITHMS = f"ddp,local_sgd(every=8),{FLAT},{LOCAL},sgp(overlap=1)"
MODEL = ("--width", "256", "--depth", "4", "--context", "128", "--batch-size", "3")
HEADINGS = ("method", "a step", "x torch DDP", "sent a step")
BENCH = Bench(
    name="sgp/within_node",
    claim="Averaging inside nodes first makes SGP faster",
    minutes=2,
    full_minutes=8,
)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def rows(comparison: Comparison) -> list[Row]:
    """One line for each method."""
    baseline = next(seconds(r) for r in comparison.results if r.is_baseline)
    return [
        (
            r.name,
            f"{seconds(r):.3f} s",
            f"{baseline / seconds(r):.2f}",
            size(middle(r.bytes_per_step)),
        )
        for r in comparison.results
    ]


def claims(comparison: Comparison) -> list[Claim]:
    results = {result.name: result for result in comparison.results}
    flat, local = seconds(results[FLAT]), seconds(results[LOCAL])
    text = f"{LOCAL} is faster than {FLAT} between all ranks"
    return [Claim(text, "faster", f"{local:.3f} s against {flat:.3f} s", local < flat)]


@app.command(epilog=BENCH.examples("--full"))
def main(
    full: Annotated[bool, typer.Option("--full", help="Three rounds, 40 steps.")] = False,
    rate: Annotated[str, typer.Option(help="Of every node's link.")] = "250mbit",
    steps: Annotated[int, typer.Option(help="Optimizer steps of each run.")] = 16,
) -> None:
    """Time SGP on two nodes with two ranks each."""
    steps, rounds = (40, 3) if full else (steps, 1)
    methods, baseline = parse_methods(ALGORITHMS, baseline="torch-ddp", compute_only=True)
    arguments = (*MODEL, "--report-every", str(steps), "--windows", "8")
    experiment = Experiment(EXAMPLES / "char_gpt.py", methods, baseline, arguments, steps, rounds)
    comparison = compare(experiment, NODES, rate, RANKS)
    title = f"A step of a GPT, {NODES} nodes with {RANKS} ranks each, {rate}"
    report(
        BENCH, title, HEADINGS, rows(comparison), claims(comparison), measured=figures(comparison)
    )


if __name__ == "__main__":
    app()
