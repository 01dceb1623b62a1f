"""Asynchronous Adam on sparser and on dense rows, which the paper leaves to future work.

In sparser rows workers rarely update the same coordinates, in dense ones they always do.
"""

import os

from rich.progress import track

from bench.async_adam.curves import Curve, timed, tuned
from bench.async_adam.methods import Method, adam, baseline
from bench.async_adam.sparse_problem import Problem, generate
from bench.harness import Bench, Claim, Result, command, console

GRID = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0)  # the paper's; larger ones diverge here
HEADINGS = ("rows", "method", "step size", "loss at the end", "test error", "ms a pass")
BENCH = Bench(
    name="async_adam/density",
    claim="Shared suits sparse rows, private dense ones",
    minutes=2,
    full_minutes=8,
)


def compared(name: str, problem: Problem, passes: int) -> list[Curve]:
    """Each method at its best step size."""
    methods: list[Method] = [adam(), adam("shared", 2), adam("private", 2)]
    methods += [baseline(svrg=False), baseline(svrg=True)]
    work = track(methods, name, console=console)
    return timed([tuned(m, problem, passes, GRID) for m in work], methods, problem)


def claims(drawn: dict[str, list[Curve]]) -> list[Claim]:
    made = []
    for name, (serial, shared, private, *_) in drawn.items():
        common = max(shared.loss[-1], private.loss[-1])
        ends = f"{shared.loss[-1]:.4f}, {private.loss[-1]:.4f}"
        ms = [1e3 * c.seconds_to(common) for c in (shared, private)]
        worse = shared.loss[-1] > private.loss[-1]
        if name == "dense":
            made.append(Claim("dense: Shared ends above Private", "expected", ends, worse))
        else:
            made.append(Claim("sparser: Shared ends no higher than Private", "expected", ends,
                              not worse))  # fmt: skip
        made.append(
            Claim(f"{name}: Shared reaches the common loss before Private", "found at 0.01",
                  f"{ms[0]:.2f}, {ms[1]:.2f} ms", ms[0] < ms[1])
        )  # fmt: skip
        pace = serial.pace / shared.pace
        made.append(
            Claim(f"{name}: passes are faster with 2 threads", "2 x", f"{pace:.2f} x", pace > 1.5)
        )
    return made


@command(BENCH, "--full", full="Five times the passes.")
def app(full: bool = False) -> Result:
    """Tune every method on a sparser and on a dense problem."""
    passes = 100 if full else 20
    problems = {"density 0.001": generate(0.001), "dense": generate(1.0, n=2000, d=256)}
    drawn = {name: compared(name, p, passes) for name, p in problems.items()}
    rows = [(name, *curve.cells) for name, curves in drawn.items() for curve in curves]
    title = f"Sparser and dense rows, {passes} passes, {os.cpu_count()} cores"
    return Result(title, HEADINGS, rows, claims(drawn), raw=drawn)
