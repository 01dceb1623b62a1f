"""An LSTM under LAGS comes near dense SGD in equal steps.

On characters, with plain SGD. The paper's density is 0.004 for its LSTM, four times that of its
convolutional nets. It is raised here as in ``lags/convergence``: in the ratio of 14,000 steps to
ours.
"""

import offbeat
from bench.harness import Bench, Result, command
from bench.lags.training import DENSE, LAGS, LSTM, SLGS

BENCH = Bench(name="lags/language", minutes=10, full_minutes=60, evidence="Table 1, Fig. 3")


def methods(steps: int) -> dict[str, offbeat.Algorithm]:
    """0.035 in 1,600 steps."""
    density = min(0.25, 56 / steps)
    return {DENSE: offbeat.ddp(), SLGS: offbeat.slgs(density), LAGS: offbeat.lags(density)}


@command(BENCH, "--seeds 1", "--full", full={"workers": 16})
def app(steps: int = 1600, workers: int = 4, seeds: int = 6) -> Result:
    found = LSTM.measure(methods(steps), steps, workers, seeds)
    rows = [
        (name, f"{runs:.2f}", str(runs.change(found[DENSE])), f"{paper}", str(LSTM.printed(name)))
        for (name, runs), paper in zip(found.items(), LSTM.paper, strict=True)
    ]
    title = f"held-out perplexity, {workers} workers, {steps} steps, seeds: {seeds}"
    headings = ("method", "perplexity", "against dense", "paper", "against dense, paper")
    return Result(title, headings, rows, LSTM.claims(found), found)
