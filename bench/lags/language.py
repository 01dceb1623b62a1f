"""Perplexity of dense SGD, SLGS and LAGS in equal steps (the LSTM of Table 1 of the LAGS paper).

An LSTM on characters, virtual workers, plain SGD. The paper's density is 0.004 for its LSTM, four
times that of its convolutional nets. It is raised here as theirs is in
:mod:`bench.lags.convergence`: in the ratio of 14,000 steps to ours.
"""

from typing import Annotated

import typer

import offbeat
from bench.harness.bench import Bench
from bench.harness.report import report
from bench.lags.runs import DENSE, LAGS, SLGS, measure
from bench.lags.training import LSTM

BENCH = Bench(
    name="lags/language",
    claim="An LSTM under LAGS comes near dense SGD (Table 1)",
    minutes=10,
    full_minutes=60,
    evidence={"Table 1, Fig. 3": ""},  # with lags/convergence
)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def methods(steps: int) -> dict[str, offbeat.Algorithm]:
    """0.035 in 1,600 steps."""
    density = min(0.25, 56 / steps)
    return {DENSE: offbeat.ddp(), SLGS: offbeat.slgs(density), LAGS: offbeat.lags(density)}


@app.command(epilog=BENCH.examples("--seeds 1", "--full"))
def main(
    full: Annotated[bool, typer.Option("--full", help="16 workers.")] = False,
    steps: Annotated[int, typer.Option(help="Optimizer steps of each run.")] = 1600,
    workers: Annotated[int, typer.Option(help="Virtual workers.")] = 4,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each method.")] = 6,
) -> None:
    """Train an LSTM under three methods."""
    workers = 16 if full else workers
    runs = measure(LSTM, methods(steps), steps, workers, seeds)
    lines = [
        (name, runs.end(name, 2), str(runs.change(name)), f"{paper}", str(runs.printed(name)))
        for name, paper in zip(runs.curves, LSTM.paper, strict=True)
    ]
    judged = [runs.near(LAGS), runs.near(SLGS), runs.near(LAGS, SLGS)]
    title = f"held-out perplexity, {workers} workers, {steps} steps, seeds: {seeds}"
    headings = ("method", "perplexity", "against dense", "paper", "against dense, paper")
    report(BENCH, title, headings, lines, judged, measured=runs.ends, raw=runs.curves)


if __name__ == "__main__":
    app()
