"""Updates per second of asynchronous Adam, and time to a held-out loss beside scikit-learn.

The paper's problem by threads, moments and dtype; an embedding of 1,000,000 x 64 with 1,000 rows
touched, beside torch.optim.SparseAdam; SGDClassifier side by side. All in turns, best of several.
"""

import json
import sys
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
from sklearn.linear_model import SGDClassifier

sys.path.insert(0, str(Path(__file__).parent))

from _sparse import L2, Problem, adam, generate

from offbeat.hogwild import AsyncAdam, AsyncAdamClassifier

RESULTS = Path(__file__).parent / "results" / "async_adam_speed.json"
ORIGINAL = {1: 15.5e3, 2: 29.4e3}  # updates/s of the original C++ on such a machine
CASES = [(t, m, k) for k in ("float32", "float64") for t, m in ((1, "shared"), (2, "shared"), (2, "private"))]  # fmt: skip  # noqa: E501
console = Console(highlight=False)


def updates_per_second(problem: Problem, threads: int, moments: str, kind: str) -> float:
    """One fit of 65,000 updates; without compiling, which an earlier short one does."""
    model = AsyncAdamClassifier(
        moments,  # type: ignore[arg-type]
        n_jobs=threads,
        l2=L2,
        tol=None,
        fit_intercept=False,
        random_state=0,
    )
    x = problem.x.astype(kind)
    model.set_params(max_iter=1).fit(x, problem.y)
    model.set_params(max_iter=104)
    start = time.perf_counter()
    model.fit(x, problem.y)
    return float(model.n_updates_ / (time.perf_counter() - start))


def sparse_steps(build: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]) -> float:
    """Optimizer steps per second; the gradient stays the same, with rows that repeat."""
    weight = torch.nn.Parameter(torch.zeros(1_000_000, 64))
    optimizer = build([weight])
    rows = torch.randint(1_000_000, (1, 1000), generator=torch.Generator().manual_seed(0))
    values = torch.randn(1000, 64)
    weight.grad = torch.sparse_coo_tensor(rows, values, weight.shape, check_invariants=False)
    for _ in range(3):
        optimizer.step()
    start = time.perf_counter()
    for _ in range(50):
        optimizer.step()
    return 50 / (time.perf_counter() - start)


def held_out(problem: Problem, theta: np.ndarray) -> float:
    z = problem.test_x @ theta
    return float(np.mean(np.logaddexp(0, z) - problem.test_y * z))


def sgd_classifier(problem: Problem, passes: int) -> list[tuple[float, float]]:
    """Seconds and held-out loss of scikit-learn's own, pass by pass."""
    model = SGDClassifier(loss="log_loss", alpha=L2, fit_intercept=False, random_state=0)
    x, seconds, curve = problem.x.astype(np.float64), 0.0, []
    for _ in range(passes):
        start = time.perf_counter()
        model.partial_fit(x, problem.y, classes=[0.0, 1.0])
        seconds += time.perf_counter() - start
        curve.append((seconds, held_out(problem, model.coef_[0])))
    return curve


class HeldOut(Problem):
    """The same rows, watched by their held-out loss."""

    def loss(self, theta: np.ndarray) -> float:
        return held_out(self, theta)


def ours(problem: Problem, passes: int, threads: int) -> list[tuple[float, float]]:
    """The same of asynchronous Adam."""
    watched = HeldOut(problem.name, problem.x, problem.y, problem.test_x, problem.test_y)
    curve = adam(watched, passes, 0.005, threads=threads)
    return list(zip(curve.seconds, curve.loss, strict=True))


def main(full: Annotated[bool, typer.Option("--full", help="More repeats.")] = False) -> None:
    """Measure everything in turns."""
    problem, repeats = generate("paper"), 12 if full else 4
    pace = dict.fromkeys(CASES, 0.0)
    builders = {"SparseAdam": torch.optim.SparseAdam, "AsyncAdam": AsyncAdam}
    steps = dict.fromkeys(builders, 0.0)
    for _ in range(repeats):
        for case in CASES:
            pace[case] = max(pace[case], updates_per_second(problem, *case))
        for name, build in builders.items():
            steps[name] = max(steps[name], sparse_steps(build))
    curves = {f"AsyncAdam, {t} threads": ours(problem, 30, t) for t in (1, 2)}
    curves["SGDClassifier"] = sgd_classifier(problem, 30)
    shown = Table("threads", "moments", "dtype", "updates/s", "x 1 thread", "x original C++")
    for (threads, moments, kind), found in pace.items():
        single = pace[1, "shared", kind]
        times = (f"{found:,.0f}", f"{found / single:.2f}", f"{found / ORIGINAL[threads]:.1f}")
        shown.add_row(str(threads), moments, kind, *times)
    console.print(shown)
    ratio = steps["AsyncAdam"] / steps["SparseAdam"]
    console.print(f"1 M x 64, 1,000 rows: {steps} steps/s, {ratio:.1f} x SparseAdam")
    common = max(min(loss for _, loss in curve) for curve in curves.values())
    for name, curve in curves.items():
        reached = min(seconds for seconds, loss in curve if loss <= common)
        console.print(f"{name}: {reached * 1e3:.1f} ms to held-out loss {common:.4f}")
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "updates_per_second": {" ".join(map(str, case)): v for case, v in pace.items()},
        "steps_per_second": steps,
        "held_out": curves,
    }
    RESULTS.write_text(json.dumps(report) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
