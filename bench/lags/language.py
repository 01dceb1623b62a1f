"""Perplexity of dense SGD, SLGS and LAGS in equal steps (the LSTM of Table 1 of the LAGS paper).

An LSTM on characters, virtual workers, plain SGD. The paper's density is 0.004 for its LSTM, four
times that of its convolutional nets. It is raised here as theirs is in
:mod:`bench.lags.convergence`: in the ratio of 14,000 steps to ours.
"""

import offbeat
from bench.harness import Bench, Result, command
from bench.lags.runs import DENSE, LAGS, SLGS, measure
from bench.lags.training import LSTM

BENCH = Bench(
    name="lags/language",
    claim="An LSTM under LAGS comes near dense SGD (Table 1)",
    minutes=10,
    full_minutes=60,
    evidence={"Table 1, Fig. 3": ""},  # with lags/convergence
)


def methods(steps: int) -> dict[str, offbeat.Algorithm]:
    """0.035 in 1,600 steps."""
    density = min(0.25, 56 / steps)
    return {DENSE: offbeat.ddp(), SLGS: offbeat.slgs(density), LAGS: offbeat.lags(density)}


@command(BENCH, "--seeds 1", "--full", full="16 workers.")
def app(full: bool = False, steps: int = 1600, workers: int = 4, seeds: int = 6) -> Result:
    """Train an LSTM under three methods."""
    workers = 16 if full else workers
    runs = measure(LSTM, methods(steps), steps, workers, seeds)
    lines = [
        (name, runs.end(name, 2), str(runs.change(name)), f"{paper}", str(runs.printed(name)))
        for name, paper in zip(runs.ends, LSTM.paper, strict=True)
    ]
    judged = [runs.near(LAGS), runs.near(SLGS), runs.near(LAGS, SLGS)]
    title = f"held-out perplexity, {workers} workers, {steps} steps, seeds: {seeds}"
    headings = ("method", "perplexity", "against dense", "paper", "against dense, paper")
    return Result(title, headings, lines, judged, runs.ends)
