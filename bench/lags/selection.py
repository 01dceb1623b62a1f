"""Time and recall of top-k selection, beside `torch.topk`, on one CPU thread."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from bench.harness.bench import Bench
from bench.harness.claim import Claim
from bench.harness.console import console
from bench.harness.report import report
from offbeat.functional import count_kept, sampled_top_k, top_k
from offbeat.kernels.top_k import scanned_top_k

Select = Callable[[Tensor, int], Tensor]
SIZES, DENSITIES = (100_000, 1_000_000, 10_000_000), (0.001, 0.004, 0.01)
TORCH, CHOSEN, READING = "torch.topk", "numba", "one read"
BENCH = Bench(
    name="lags/selection",
    claim="Top-k in a tenth of the time of torch.topk",
    minutes=1,
    full_minutes=5,
)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def full(x: Tensor, k: int) -> Tensor:
    """The straightforward selection."""
    return x.abs().topk(k, sorted=False).indices


WAYS: dict[str, Select] = {TORCH: full, "exact": top_k, "sampled": sampled_top_k,
                          CHOSEN: scanned_top_k}  # fmt: skip


def recall(x: Tensor, chosen: Tensor, k: int) -> float:
    """The share of the true top-k that was chosen; of tied entries any will do."""
    threshold = x.abs().topk(k).values[-1]
    return float((x[chosen].abs() >= threshold).double().mean())


def timed(select: Select, x: Tensor, k: int) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    select(x, k)
    return time.perf_counter() - start


def measure(numel: int, density: float, rounds: int) -> dict[str, Any]:
    """All ways in turns on the same numbers."""
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    k = count_kept(numel, density)
    times: dict[str, list[float]] = {way: [] for way in (*WAYS, READING)}
    for select in WAYS.values():
        select(x, k)
    for _ in range(rounds):
        for way, select in WAYS.items():
            times[way].append(timed(select, x, k))
        times[READING].append(timed(lambda x, k: x.sum(), x, k))
    found = {way: recall(x, select(x, k), k) for way, select in WAYS.items()}
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


def claims(cases: Sequence[dict[str, Any]]) -> list[Claim]:
    made = []
    for case in cases:
        if case["numel"] == max(SIZES):
            seconds = case["seconds"]
            faster = median(seconds[TORCH]) / median(seconds[CHOSEN])
            text = f"{case['numel']:,} elements, density {case['density']}: faster than torch.topk"
            made.append(Claim(text, "10 x", f"{faster:.1f} x", faster >= 10))
    return made


@app.command(epilog=BENCH.examples("--full"))
def main(
    full: Annotated[bool, typer.Option("--full", help="Five times the rounds.")] = False,
) -> None:
    """Measure three sizes and three densities."""
    torch.set_num_threads(1)
    rounds = 35 if full else 7
    cases = [measure(numel, density, rounds) for numel in SIZES for density in DENSITIES]
    headings = ("elements", "density", *WAYS, READING, "faster", "recall")
    title = f"The k largest magnitudes, one CPU thread, medians of {rounds}"
    report(BENCH, title, headings, rows(cases), claims(cases), measured=cases)


if __name__ == "__main__":
    app()
