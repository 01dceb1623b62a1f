"""Time and recall of top-k selection, beside `torch.topk`, on one CPU thread."""

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from bench.harness import Bench, Claim, Result, command, console
from bench.harness.turns import in_turns
from offbeat.functional import count_kept, sampled_top_k, top_k
from offbeat.kernels.top_k import scanned_blocks

Select = Callable[[Tensor, int], Tensor]
SIZES, DENSITIES = (100_000, 1_000_000, 10_000_000), (0.001, 0.004, 0.01)
TORCH, CHOSEN, READING = "torch.topk", "numba", "one read"
BENCH = Bench(
    name="lags/selection",
    claim="Top-k in a tenth of the time of torch.topk",
    minutes=1,
    full_minutes=5,
)


def full(x: Tensor, k: int) -> Tensor:
    """The straightforward selection."""
    return x.abs().topk(k, sorted=False).indices


WAYS: dict[str, Select] = {TORCH: full, "exact": top_k, "sampled": sampled_top_k,
                          CHOSEN: lambda x, k: scanned_blocks(x, [(0, len(x), k)])}  # fmt: skip


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
    console.print(f"{numel:,} elements, density {density}", style="dim")
    return {"numel": numel, "density": density, "seconds": times, "recall": found}


def rows(cases: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Medians in milliseconds, and how many times faster than torch.topk."""
    lines = []
    for case in cases:
        seconds = {way: median(times) for way, times in case["seconds"].items()}
        milliseconds = [f"{s * 1e3:.2f} ms" for s in seconds.values()]
        faster, worst = seconds[TORCH] / seconds[CHOSEN], min(case["recall"].values())
        size = f"{case['numel']:,}", f"{case['density']}"
        lines.append((*size, *milliseconds, f"{faster:.1f} x", f"{worst:.3f}"))
    return lines


def claim(case: dict[str, Any]) -> Claim:
    faster = median(case["seconds"][TORCH]) / median(case["seconds"][CHOSEN])
    text = f"{case['numel']:,} elements, density {case['density']}: faster than torch.topk"
    return Claim(text, "10 x", f"{faster:.1f} x", faster >= 10)


@command(BENCH, "--full", full="Five times the rounds.")
def app(full: bool = False) -> Result:
    """Measure three sizes and three densities."""
    torch.set_num_threads(1)
    rounds = 35 if full else 7
    cases = [measure(numel, density, rounds) for numel in SIZES for density in DENSITIES]
    headings = ("elements", "density", *WAYS, READING, "faster", "recall")
    title = f"The k largest magnitudes, one CPU thread, medians of {rounds}"
    claims = [claim(case) for case in cases if case["numel"] == max(SIZES)]
    return Result(title, headings, rows(cases), claims, cases)
