"""Top-k in a tenth of the time of torch.topk, on one CPU thread."""

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from bench.harness import Bench, Claim, Result, command
from bench.harness.turns import in_turns
from offbeat.functional import count_kept, sampled_top_k, top_k
from offbeat.kernels.top_k import scanned_blocks

SIZES, DENSITIES = (100_000, 1_000_000, 10_000_000), (0.001, 0.004, 0.01)
TORCH, CHOSEN, READING = "torch.topk", "numba", "one read"
WAYS: dict[str, Callable[[Tensor, int], Tensor]] = {
    TORCH: lambda x, k: x.abs().topk(k, sorted=False).indices,
    "exact": top_k,
    "sampled": sampled_top_k,
    CHOSEN: lambda x, k: scanned_blocks(x, [(0, len(x), k)]),
}
BENCH = Bench(name="lags/selection", minutes=1, full_minutes=5)


def recall(x: Tensor, chosen: Tensor, k: int) -> float:
    """The share of the true top-k that was chosen; of tied entries any will do."""
    threshold = x.abs().topk(k).values[-1]
    return float((x[chosen].abs() >= threshold).double().mean())


def measure(numel: int, density: float, rounds: int) -> dict[str, Any]:
    """All ways in turns on the same numbers."""
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    k = count_kept(numel, density)
    ways = {way: partial(select, x, k) for way, select in WAYS.items()}
    times = in_turns({**ways, READING: x.sum}, rounds, warm_up=1)
    found = {way: recall(x, select(), k) for way, select in ways.items()}
    return {"numel": numel, "density": density, "seconds": times, "recall": found}


@command(BENCH, "--full", full={"rounds": 35})
def app(rounds: int = 7) -> Result:
    torch.set_num_threads(1)
    rows, claims = [], []
    cases = [measure(numel, density, rounds) for numel in SIZES for density in DENSITIES]
    for case in cases:
        seconds = {way: median(times) for way, times in case["seconds"].items()}
        size, density = f"{case['numel']:,}", f"{case['density']}"
        gain, worst = seconds[TORCH] / seconds[CHOSEN], min(case["recall"].values())
        milliseconds = (f"{each * 1e3:.2f} ms" for each in seconds.values())
        rows.append((size, density, *milliseconds, f"{gain:.1f} x", f"{worst:.3f}"))
        if case["numel"] == max(SIZES):
            text = f"{size} elements, density {density}: faster than torch.topk"
            claims.append(Claim(text, "10 x", f"{gain:.1f} x", gain >= 10))
    headings = ("elements", "density", *WAYS, READING, "faster", "recall")
    title = f"The k largest magnitudes, one CPU thread, medians of {rounds}"
    return Result(title, headings, rows, claims, cases)
