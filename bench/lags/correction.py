"""What momentum correction, masking and local clipping cost or gain under LAGS, on an LSTM.

As in :mod:`bench.lags.language`, with momentum and fewer steps. Masking sets the velocity of what
is sent to zero, as in deep gradient compression. The LAGS paper measures none of this.
"""

from dataclasses import replace

import offbeat
from bench.harness import GOAL, Bench, Claim, Result, command
from bench.lags.runs import DENSE, LAGS, Runs, measure
from bench.lags.training import LSTM, MOMENTUM

DENSITY = 0.035
TASK = replace(LSTM, lr=0.3, momentum=MOMENTUM)
CORRECTED, MASKED, NARROW = "momentum correction", "with masking", "16-bit values"
METHODS = {
    DENSE: offbeat.ddp(),
    LAGS: offbeat.lags(DENSITY),
    CORRECTED: offbeat.lags(DENSITY, momentum=MOMENTUM),
    MASKED: offbeat.lags(DENSITY, momentum=MOMENTUM, masking=True),
    "clipping before the residual": offbeat.lags(DENSITY, clip_norm=1.0),
    NARROW: offbeat.lags(DENSITY, wire="bf16"),
}
BENCH = Bench(name="lags/correction", claim="Masking trains worse, 16-bit values do not", minutes=4)


def claims(runs: Runs) -> list[Claim]:
    masked, narrow = runs.change(MASKED, CORRECTED), runs.change(NARROW, LAGS)
    return [
        Claim("masking has a higher perplexity than momentum correction alone, the default",
              "higher", str(masked), masked.gain > 0 and masked.is_beyond_noise, GOAL),
        Claim("16-bit values have at most 1 % more perplexity", "at most +1.0 %", str(narrow),
              narrow.size <= 1.0, GOAL),
    ]  # fmt: skip


@command(BENCH, "--steps 800")
def app(steps: int = 400, workers: int = 4, seeds: int = 3) -> Result:
    """Train an LSTM with and without the techniques of deep gradient compression."""
    runs = measure(TASK, METHODS, steps, workers, seeds)
    lines = [(name, runs.end(name, 2), str(runs.change(name))) for name in METHODS]
    title = (
        f"held-out perplexity, {workers} workers, {steps} steps, density {DENSITY}, seeds: {seeds}"
    )
    headings = ("method", "perplexity", "against dense")
    return Result(title, headings, lines, claims(runs), runs.ends)
