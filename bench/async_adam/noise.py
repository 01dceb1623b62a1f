"""What asynchrony does to the loss by passes (Renda, Figures 1, 2 and 5), over seeds.

The paper's 12 threads have a core each. Here 12 workers take turns (`bench.async_adam.turns`),
which gives their course by passes on any hardware; two threads on two cores stand beside them.
"""

from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from rich.progress import track

from bench.async_adam.curves import record
from bench.async_adam.methods import Method, adam
from bench.async_adam.sparse_problem import Problem, generate
from bench.async_adam.turns import turns
from bench.harness import Bench, Claim, Effect, Result, command, console

PASSES, LAST = 40, 10  # passes of a run, and those whose mean loss is that at the end
EARLY = slice(2, 6)  # looks after passes 2 to 5
SMALL, MEDIUM, LARGE = 0.005, 0.03, 0.1
CROWDS = (1, 4, 12)
HEADINGS = ("step size", "method", "loss after passes 2 to 5", "loss at the end")
BENCH = Bench(
    name="async_adam/noise",
    claim="More workers add noise by passes (Fig. 1, 2, 5)",
    minutes=2,
    full_minutes=6,
    evidence={
        "Fig. 1, 2": "",  # with async_adam/paper
        "Fig. 5": "With large steps, more threads end higher",
    },
)


@dataclass(frozen=True)
class Course:
    """A method at a step size: mean losses of passes, by seed."""

    alpha: float
    label: str
    early: Effect
    end: Effect

    @property
    def row(self) -> tuple[str, ...]:
        return f"{self.alpha:g}", self.label, f"{self.early:.4f}", f"{self.end:.4f}"


def course(problem: Problem, alpha: float, seeds: list[Method]) -> Course:
    """Train with each seed."""
    curves = [record(method(problem, alpha), problem, PASSES) for method in seeds]
    early = [fmean(curve.loss[EARLY]) for curve in curves]
    end = [fmean(curve.loss[-LAST:]) for curve in curves]
    return Course(alpha, curves[0].label, Effect.mean(early), Effect.mean(end))


def cases(seeds: int) -> list[tuple[float, list[Method]]]:
    """Step sizes and methods, each with all seeds."""
    every = range(seeds)
    three = [("shared", 1), ("shared", 12), ("private", 12)]
    found = [(a, [turns(*of, seed) for seed in every]) for a in (SMALL, MEDIUM) for of in three]
    for moments in ("shared", "private"):
        found.append((MEDIUM, [adam(moments, 2, seed) for seed in every]))
    found += [(LARGE, [turns("shared", count, seed) for seed in every]) for count in CROWDS]
    return found


def claims(small: list[Course], medium: list[Course], crowds: list[Course]) -> list[Claim]:
    private, shared = small[2], medium[1]
    ends = ", ".join(f"{each.end:.3f}" for each in crowds)
    return [
        above(f"1: Shared ends above serial, step {MEDIUM:g}", shared.end, medium[0].end,
              "larger noise ball", "Fig. 1, 2"),
        above(f"1: Private ends above serial, step {SMALL:g}", private.end, small[0].end,
              "larger noise ball", "Fig. 1, 2"),
        above(f"2: by passes Shared is worse than serial, step {MEDIUM:g}", shared.early,
              medium[0].early, "worse", "Fig. 1, 2"),
        above(f"2: by passes Private is worse than serial, step {SMALL:g}", private.early,
              small[0].early, "worse", "Fig. 1, 2"),
        Claim(f"5: step {LARGE:g}, more workers end higher {CROWDS}", "worse", ends,
              all(more.end.is_above(fewer.end) for fewer, more in pairwise(crowds)), "Fig. 5"),
    ]  # fmt: skip


def above(text: str, ours: Effect, serial: Effect, paper: str, source: str) -> Claim:
    """The difference must be beyond the noise of the seeds."""
    shown = f"{ours:.4f}; serial {serial:.4f}"
    return Claim(text, paper, shown, ours.is_above(serial), source)


@command(BENCH, "--full", full="30 seeds instead of 10.")
def app(full: bool = False) -> Result:
    """Train with one and with twelve workers, at a small, a medium and a large step."""
    problem, seeds = generate(), 30 if full else 10
    work = track(cases(seeds), "training", console=console)
    found = [course(problem, *case) for case in work]
    small, medium, crowds = found[:3], found[3:8], found[8:]
    title = f"Losses by passes, {seeds} seeds, mean ± standard error"
    rows = [each.row for each in found]
    return Result(title, HEADINGS, rows, claims(small, medium, crowds), raw=found)
