"""How much faster than `torch.topk` the k largest entries are found, and whether all of them.

The goal is a tenth of its time for 10 M elements. One CPU thread.
"""

import json
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from offbeat.functional import kept, sampled_top_k, top_k
from offbeat.functional.scan import scanned_top_k

RESULTS = Path(__file__).parent / "results" / "lags_selection.json"
Select = Callable[[Tensor, int], Tensor]
console = Console(highlight=False)


def full(x: Tensor, k: int) -> Tensor:
    """What everybody writes first."""
    return x.abs().topk(k, sorted=False).indices


WAYS: dict[str, Select] = {"torch.topk": full, "exact": top_k, "sampled": sampled_top_k,
                          "numba": scanned_top_k}  # fmt: skip


def recall(x: Tensor, chosen: Tensor, k: int) -> float:
    """The share of the true top-k that was chosen; of tied entries any will do."""
    threshold = x.abs().topk(k).values[-1]
    return float((x[chosen].abs() >= threshold).double().mean())


def timed(select: Select, x: Tensor, k: int) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    select(x, k)
    return time.perf_counter() - start


def measure(numel: int, density: float, rounds: int) -> dict[str, object]:
    """All ways in turns on the same numbers."""
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    k = kept(numel, density)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for select in WAYS.values():
        select(x, k)
    for _ in range(rounds):
        for way, select in WAYS.items():
            times[way].append(timed(select, x, k))
        times.setdefault("one reading", []).append(timed(lambda x, k: x.sum(), x, k))
    found = {way: recall(x, select(x, k), k) for way, select in WAYS.items()}
    return {"numel": numel, "density": density, "seconds": times, "recall": found}


def table(cases: list[dict[str, object]]) -> Table:
    """Medians in milliseconds, and how many times faster than torch.topk."""
    shown = Table(title="the k largest magnitudes, one CPU thread")
    for heading in ("elements", "density", *WAYS, "one reading", "faster", "recall"):
        shown.add_column(heading, justify="right")
    for case in cases:
        seconds = {way: float(np.median(t)) for way, t in case["seconds"].items()}
        milliseconds = [f"{s * 1e3:.2f} ms" for s in seconds.values()]
        faster = seconds["torch.topk"] / seconds["numba"]
        worst = min(case["recall"].values())
        numbers = (f"{case['numel']:,}", str(case["density"]))
        shown.add_row(*numbers, *milliseconds, f"{faster:.1f} x", f"{worst:.3f}")
    return shown


def main(
    full: Annotated[bool, typer.Option("--full", help="Five times the rounds.")] = False,
) -> None:
    """Measure three sizes and three densities."""
    torch.set_num_threads(1)
    rounds = 35 if full else 7
    sizes, densities = (100_000, 1_000_000, 10_000_000), (0.001, 0.004, 0.01)
    cases = [measure(numel, density, rounds) for numel in sizes for density in densities]
    console.print(table(cases))
    about = {"torch": torch.__version__, "cpu_count": os.cpu_count(), "rounds": rounds}
    date = datetime.now(UTC).isoformat(timespec="seconds")
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps({"date": date, **about, "cases": cases}, indent=1) + "\n")
    console.print(f"every round's times: {os.path.relpath(RESULTS)}")


if __name__ == "__main__":
    typer.run(main)
