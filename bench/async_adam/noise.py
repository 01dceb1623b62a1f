"""More workers add noise by passes.

The paper's 12 threads have a core each. Here 12 workers take turns, which gives their course by
passes on any hardware; two threads on two cores stand beside them.
"""

from itertools import pairwise
from statistics import fmean

from bench.async_adam.curves import record
from bench.async_adam.methods import SERIAL, Method, adam, turns
from bench.async_adam.sparse_problem import generate
from bench.harness import Bench, Claim, Effect, Result, command

PASSES, LAST = 40, 10  # passes of a run, and those whose mean loss is that at the end
EARLY = slice(2, 6)  # looks after passes 2 to 5
SMALL, MEDIUM, LARGE = 0.005, 0.03, 0.1
THREE = (turns, "shared", 1), (turns, "shared", 12), (turns, "private", 12)
CROWDS = (1, 4, 12)
CASES = (  # step size; method, moments and workers
    *((SMALL, *case) for case in THREE),
    *((MEDIUM, *case) for case in THREE),
    *((MEDIUM, adam, moments, 2) for moments in ("shared", "private")),
    *((LARGE, turns, "shared", count) for count in CROWDS),
)
HEADINGS = ("step size", "method", "loss after passes 2 to 5", "loss at the end")
BENCH = Bench(
    name="async_adam/noise",
    minutes=2,
    full_minutes=6,
    evidence={
        "Fig. 1, 2": "",  # with async_adam/paper
        "Fig. 5": "With large steps, more threads end higher",
    },
)
SHARED, PRIVATE = "shared, 12 workers", "private, 12 workers"
Losses = dict[tuple[float, str], Effect]  # by step size and method, means over seeds


def above(text: str, of: Losses, alpha: float, label: str, paper: str) -> Claim:
    """The difference must be beyond the noise of the seeds."""
    ours, serial = of[alpha, label], of[alpha, SERIAL]
    shown = f"{ours:.4f}; serial {serial:.4f}"
    return Claim(text, paper, shown, ours.is_above(serial), "Fig. 1, 2")


def claims(early: Losses, end: Losses) -> list[Claim]:
    crowds = [end[LARGE, label] for label in (SERIAL, "shared, 4 workers", SHARED)]
    ends = ", ".join(f"{each:.3f}" for each in crowds)
    ball, small, medium = "larger noise ball", f"step {SMALL:g}", f"step {MEDIUM:g}"
    return [
        above(f"1: Shared ends above serial, {medium}", end, MEDIUM, SHARED, ball),
        above(f"1: Private ends above serial, {small}", end, SMALL, PRIVATE, ball),
        above(f"2: by passes Shared is worse than serial, {medium}", early, MEDIUM, SHARED,
              "worse"),
        above(f"2: by passes Private is worse than serial, {small}", early, SMALL, PRIVATE,
              "worse"),
        Claim(f"5: step {LARGE:g}, more workers end higher {CROWDS}", "worse", ends,
              all(more.is_above(fewer) for fewer, more in pairwise(crowds)), "Fig. 5"),
    ]  # fmt: skip


@command(BENCH, "--full", full={"seeds": 30})
def app(seeds: int = 10) -> Result:
    problem, rows, early, end = generate(), [], {}, {}
    for alpha, make, *of in CASES:
        methods: list[Method] = [make(*of, seed) for seed in range(seeds)]
        curves = [record(method, problem, alpha, PASSES) for method in methods]
        case = alpha, curves[0].label
        early[case] = Effect.mean([fmean(curve.loss[EARLY]) for curve in curves])
        end[case] = Effect.mean([fmean(curve.loss[-LAST:]) for curve in curves])
        rows.append((f"{alpha:g}", case[1], f"{early[case]:.4f}", f"{end[case]:.4f}"))
    title = f"Losses by passes, {seeds} seeds, mean ± standard error"
    return Result(title, HEADINGS, rows, claims(early, end))
