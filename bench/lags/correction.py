"""Masking trains an LSTM worse than momentum correction alone, 16-bit values do not.

As in ``lags/language``, with momentum and fewer steps. Masking sets the velocity of what is sent
to zero, as in deep gradient compression. The LAGS paper measures none of this.
"""

from dataclasses import replace

import offbeat
from bench.harness import GOAL, Bench, Claim, Result, command
from bench.lags.training import DENSE, LAGS, LSTM, MOMENTUM

DENSITY = 0.035
CORRECTED, MASKED, NARROW = "momentum correction", "with masking", "16-bit values"
METHODS = {
    DENSE: offbeat.ddp(),
    LAGS: offbeat.lags(DENSITY),
    CORRECTED: offbeat.lags(DENSITY, momentum=MOMENTUM),
    MASKED: offbeat.lags(DENSITY, momentum=MOMENTUM, masking=True),
    "clipping before the residual": offbeat.lags(DENSITY, clip_norm=1.0),
    NARROW: offbeat.lags(DENSITY, wire="bf16"),
}
BENCH = Bench(name="lags/correction", minutes=4)


@command(BENCH, "--steps 800")
def app(steps: int = 400, workers: int = 4, seeds: int = 3) -> Result:
    task = replace(LSTM, rate=0.3, momentum=MOMENTUM)
    found = task.measure(METHODS, steps, workers, seeds)
    masked = found[MASKED].change(found[CORRECTED])
    narrow = found[NARROW].change(found[LAGS])
    claims = [
        Claim("masking has a higher perplexity than momentum correction alone, the default",
              "higher", str(masked), masked.gain > 0 and masked.is_beyond_noise, GOAL),
        Claim("16-bit values have at most 1 % more perplexity", "at most +1.0 %", str(narrow),
              narrow.size <= 1.0, GOAL),
    ]  # fmt: skip
    rows = [(name, f"{runs:.2f}", str(runs.change(found[DENSE]))) for name, runs in found.items()]
    trained = f"{workers} workers, {steps} steps, density {DENSITY}, seeds: {seeds}"
    headings = ("method", "perplexity", "against dense")
    return Result(f"held-out perplexity, {trained}", headings, rows, claims, found)
