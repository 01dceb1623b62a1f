"""More workers add noise by passes.

The paper's 12 threads have a core each. Here 12 workers take turns, which gives their course by
passes on any hardware; two threads on two cores stand beside them.
"""

from itertools import pairwise
from statistics import fmean

from rich.progress import track

from bench.async_adam.curves import record
from bench.async_adam.methods import Method, adam, turns
from bench.async_adam.sparse_problem import generate
from bench.harness import Bench, Claim, Effect, Result, command, console

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
Course = tuple[Effect, Effect]  # mean losses of early passes and at the end, over seeds


def claims(small: list[Course], medium: list[Course], crowds: list[Effect]) -> list[Claim]:
    """Differences must be beyond the noise of the seeds."""

    def above(text: str, pair: tuple[Effect, Effect], paper: str) -> Claim:
        ours, serial = pair
        shown = f"{ours:.4f}; serial {serial:.4f}"
        return Claim(text, paper, shown, ours.is_above(serial), "Fig. 1, 2")

    (serial, _, private), (medium_serial, shared, *_) = small, medium
    early, end = zip(shared, medium_serial, strict=True)
    private_early, private_end = zip(private, serial, strict=True)
    ordered = all(more.is_above(fewer) for fewer, more in pairwise(crowds))
    ends = ", ".join(f"{each:.3f}" for each in crowds)
    ball, passes = "larger noise ball", "by passes"
    return [
        above(f"1: Shared ends above serial, step {MEDIUM:g}", end, ball),
        above(f"1: Private ends above serial, step {SMALL:g}", private_end, ball),
        above(f"2: {passes} Shared is worse than serial, step {MEDIUM:g}", early, "worse"),
        above(f"2: {passes} Private is worse than serial, step {SMALL:g}", private_early, "worse"),
        Claim(f"5: step {LARGE:g}, more workers end higher {CROWDS}", "worse", ends, ordered,
              "Fig. 5"),
    ]  # fmt: skip


@command(BENCH, "--full", full={"seeds": 30})
def app(seeds: int = 10) -> Result:
    problem, rows, found = generate(), [], []
    for alpha, make, *of in track(CASES, "training", console=console):
        methods: list[Method] = [make(*of, seed) for seed in range(seeds)]
        curves = [record(method, problem, alpha, PASSES) for method in methods]
        early = Effect.mean([fmean(curve.loss[EARLY]) for curve in curves])
        end = Effect.mean([fmean(curve.loss[-LAST:]) for curve in curves])
        rows.append((f"{alpha:g}", curves[0].label, f"{early:.4f}", f"{end:.4f}"))
        found.append((early, end))
    judged = claims(found[:3], found[3:8], [end for _, end in found[8:]])
    title = f"Losses by passes, {seeds} seeds, mean ± standard error"
    return Result(title, HEADINGS, rows, judged, raw=found)
