"""Updates per second of asynchronous Adam.

The paper's problem by threads, moments and dtype, and two copies that share nothing, which is what
two cores can give at most; an embedding of 1,000,000 x 64 with 1,000 rows touched, beside
torch.optim.SparseAdam. All in turns, the fastest of many short runs.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Annotated

import torch
import typer
from _claims import Claim, report
from _sparse import BATCH, Problem, adam, generate

from offbeat.hogwild import AsyncAdam

ORIGINAL = {1: 15.5e3, 2: 29.4e3}  # updates/s of the original C++ on such a machine
THREADS = ((1, "shared"), (2, "shared"), (2, "private"))
CASES = tuple((*case, kind) for kind in ("float32", "float64") for case in THREADS)
COPIES = (2, "two copies", "float32")
HEADINGS = ("threads", "moments", "dtype", "updates/s", "x 1 thread", "x original C++")
EPILOG = "Examples: `python bench/async_adam_speed.py`, `python bench/async_adam_speed.py --full`"
app = typer.Typer(pretty_exceptions_enable=False)
Case = tuple[int, str, str]


def paces(problem: Problem, turns: int) -> dict[Case, float]:
    """Updates per second of each case, the best of many runs of three passes."""
    runs: dict[Case, list[Callable[[int], object]]] = {
        (threads, moments, kind): [
            adam(moments, threads)(replace(problem, x=problem.x.astype(kind)), 0.01).go
        ]
        for threads, moments, kind in CASES
    }
    runs[COPIES] = [adam()(problem, 0.01).go for _ in range(2)]
    updates = 3 * (problem.x.shape[0] // BATCH)
    best = dict.fromkeys(runs, 0.0)
    with ThreadPoolExecutor(2) as pool:
        for _ in range(turns):
            for case, copies in runs.items():
                start = time.perf_counter()
                for _ in pool.map(lambda go: go(3), copies):
                    pass
                pace = updates * len(copies) / (time.perf_counter() - start)
                best[case] = max(best[case], pace)
    return best


def sparse_steps(turns: int) -> dict[str, float]:
    """Optimizer steps per second on a large embedding; the gradient has rows that repeat."""
    rows = torch.randint(1_000_000, (1, 1000), generator=torch.Generator().manual_seed(0))
    values = torch.randn(1000, 64)
    gradient = torch.sparse_coo_tensor(rows, values, (1_000_000, 64), check_invariants=False)
    optimizers = {}
    for build in (torch.optim.SparseAdam, AsyncAdam):
        weight = torch.nn.Parameter(torch.zeros(1_000_000, 64))
        optimizers[build.__name__] = build([weight])
        weight.grad = gradient
    best = dict.fromkeys(optimizers, 0.0)
    for _ in range(turns):
        for name, optimizer in optimizers.items():
            start = time.perf_counter()
            for _ in range(5):
                optimizer.step()
            best[name] = max(best[name], 5 / (time.perf_counter() - start))
    return best


@app.command(epilog=EPILOG)
def main(
    full: Annotated[bool, typer.Option("--full", help="Five times the runs.")] = False,
) -> None:
    """Measure everything in turns."""
    turns = 300 if full else 60
    pace, steps = paces(generate(), turns), sparse_steps(turns // 4)
    one, ceiling = pace[CASES[0]], pace[COPIES] / pace[CASES[0]]
    gain, ratio = pace[CASES[1]] / one, steps["AsyncAdam"] / steps["SparseAdam"]
    claims = [
        Claim("1 thread, updates/s", "200,000", f"{one:,.0f}", one >= 200e3),
        Claim("2 threads, x 1 thread", "1.85", f"{gain:.2f}", gain >= 1.85),
        Claim("2 threads, of what two copies that share nothing reach", f"{ceiling:.2f} x 1 thread",
              f"{gain / ceiling:.0%}", gain >= 0.95 * ceiling),
        Claim("steps/s on 1 M x 64, 1,000 rows touched, x SparseAdam", "5", f"{ratio:.1f}",
              ratio >= 5),
    ]  # fmt: skip
    rows = [
        (str(case[0]), *case[1:], f"{p:,.0f}", f"{p / pace[1, 'shared', case[2]]:.2f}",
         f"{p / ORIGINAL[case[0]]:.1f}") for case, p in pace.items()
    ]  # fmt: skip
    report("async_adam_speed", "The paper's problem", HEADINGS, rows, claims,
           steps_per_second=steps)  # fmt: skip


if __name__ == "__main__":
    app()
