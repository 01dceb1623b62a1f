"""Two threads make 1.85 x the updates of one.

By threads, moments and dtype on the paper's problem, beside two copies of it that share nothing,
the most that two cores give; an embedding of 1,000,000 x 64 with 1,000 rows touched, beside
`torch.optim.SparseAdam`. All cases run in turns. Updates per second are those of the fastest turn,
ratios are medians over turns.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import torch

from bench.async_adam.methods import Training, adam
from bench.async_adam.sparse_problem import BATCH, generate
from bench.harness import Bench, Claim, Result, command
from bench.harness.turns import Work, in_turns, over
from offbeat.hogwild import AsyncAdam

ORIGINAL = {1: 15.5e3, 2: 29.4e3}  # updates/s of the original C++ on such a machine
THREADS = ((1, "shared"), (2, "shared"), (2, "private"))
CASES = tuple((*case, kind) for kind in ("float32", "float64") for case in THREADS)
COPIES = (2, "two copies", "float32")
PASSES = 60  # of a run: 0.2 seconds
HEADINGS = ("threads", "moments", "dtype", "updates/s", "x 1 thread", "x original C++")
BENCH = Bench(name="async_adam/speed", minutes=1, full_minutes=5)


def paces(turns: int) -> dict[tuple[int, str, str], list[float]]:
    """Updates per second of each case in every turn."""
    problem = generate()
    runs: dict[tuple[int, str, str], list[Training]] = {
        (threads, moments, kind): [
            adam(moments, threads)(replace(problem, x=problem.x.astype(kind)), 0.01)
        ]
        for threads, moments, kind in CASES
    }
    runs[COPIES] = [adam()(problem, 0.01) for _ in range(2)]
    updates = PASSES * (problem.x.shape[0] // BATCH)
    with ThreadPoolExecutor(2) as pool:

        def together(of: list[Training]) -> None:
            list(pool.map(lambda run: run.go(PASSES), of))

        found = in_turns({case: partial(together, of) for case, of in runs.items()}, turns)
    return {case: [updates * len(runs[case]) / s for s in found[case]] for case in runs}


def sparse_steps(turns: int) -> dict[str, list[float]]:
    """Optimizer steps per second on a large embedding by turn; one thread, as a worker has."""
    torch.set_num_threads(1)
    rows = torch.randint(1_000_000, (1, 1000), generator=torch.Generator().manual_seed(0))
    values = torch.randn(1000, 64)
    gradient = torch.sparse_coo_tensor(rows, values, (1_000_000, 64), check_invariants=False)
    ways: dict[str, Work] = {}
    for build in (torch.optim.SparseAdam, AsyncAdam):
        weight = torch.nn.Parameter(torch.zeros(1_000_000, 64))
        optimizer = build([weight])
        weight.grad = gradient
        ways[build.__name__] = lambda optimizer=optimizer: [optimizer.step() for _ in range(5)]
    return {name: [5 / s for s in found] for name, found in in_turns(ways, turns).items()}


@command(BENCH, "--full", full={"turns": 75}, turns="Of every case.")
def app(turns: int = 15) -> Result:
    pace, steps = paces(turns), sparse_steps(turns)
    one, two, copies = pace[CASES[0]], pace[CASES[1]], pace[COPIES]
    gain, ceiling, share = over(two, one), over(copies, one), over(two, copies)
    sparse = over(steps["AsyncAdam"], steps["SparseAdam"])
    claims = [
        Claim("1 thread, updates/s", "200,000", f"{max(one):,.0f}", max(one) >= 200e3),
        Claim("2 threads, x 1 thread", "1.85", f"{gain:.2f}", gain >= 1.85),
        Claim("2 threads, of what two copies that share nothing reach",
              f"{ceiling:.2f} x 1 thread", f"{share:.0%}", share >= 0.95),
        Claim("steps/s on 1 M x 64, 1,000 rows touched, x SparseAdam", "5", f"{sparse:.1f}",
              sparse >= 5),
    ]  # fmt: skip
    rows = [
        (f"{threads}", moments, kind, f"{max(p):,.0f}", f"{over(p, pace[1, 'shared', kind]):.2f}",
         f"{max(p) / ORIGINAL[threads]:.1f}")
        for (threads, moments, kind), p in pace.items()
    ]  # fmt: skip
    measured = {"steps_per_second": {name: max(found) for name, found in steps.items()}}
    return Result("The paper's problem", HEADINGS, rows, claims, measured)
