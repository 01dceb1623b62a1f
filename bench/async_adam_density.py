"""What Renda, Asynchronous Adam, leaves to later work: sparser and dense rows.

In sparser rows workers hardly meet, in dense ones they always do: Shared against Private, beside
serial Adam, SGD and SVRG.
"""

import os
from typing import Annotated

import typer
from _claims import RESULTS, Claim, report
from _curves import Curve, draw, timed, tuned
from _sparse import Method, Problem, adam, baseline, generate
from rich.console import Console
from rich.progress import track

GRID = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0)  # the paper's; larger ones diverge here
HEADINGS = ("rows", "method", "step size", "loss at the end", "test error", "ms a pass")
EPILOG = "Examples: `python bench/async_adam_density.py`, `... --full`"
app = typer.Typer(pretty_exceptions_enable=False)
console = Console(highlight=False)


def against_each_other(name: str, problem: Problem, passes: int) -> list[Curve]:
    """Each method at its best step size."""
    methods: list[Method] = [adam(), adam("shared", 2), adam("private", 2)]
    methods += [baseline(svrg=False), baseline(svrg=True)]
    work = track(methods, name, console=console)
    return timed([tuned(m, problem, passes, GRID) for m in work], methods, problem)


def claims(drawn: dict[str, list[Curve]]) -> list[Claim]:
    said = []
    for name, (serial, shared, private, *_) in drawn.items():
        common = max(shared.loss[-1], private.loss[-1])
        ends = f"{shared.loss[-1]:.4f}, {private.loss[-1]:.4f}"
        ms = [1e3 * c.seconds_to(common) for c in (shared, private)]
        worse = shared.loss[-1] > private.loss[-1]
        if name == "dense":
            said.append(Claim("dense: Shared ends above Private", "expected", ends, worse))
        else:
            said.append(Claim("sparser: Shared ends no higher than Private", "expected", ends,
                              not worse))  # fmt: skip
        said.append(
            Claim(f"{name}: Shared is there before Private", "found at 0.01",
                  f"{ms[0]:.2f}, {ms[1]:.2f} ms", ms[0] < ms[1])
        )  # fmt: skip
        pace = serial.pace / shared.pace
        said.append(
            Claim(f"{name}: passes go faster with 2 threads", "2 x", f"{pace:.2f} x", pace > 1.5)
        )
    return said


@app.command(epilog=EPILOG)
def main(
    full: Annotated[bool, typer.Option("--full", help="Five times the passes.")] = False,
) -> None:
    """Tune every method on a sparser and on a dense problem."""
    passes = 100 if full else 20
    problems = {"density 0.001": generate(0.001), "dense": generate(1.0, n=2000, d=256)}
    drawn = {name: against_each_other(name, p, passes) for name, p in problems.items()}
    rows = [
        (name, c.label, f"{c.alpha:g}", f"{c.loss[-1]:.4f}", f"{c.error[-1]:.4f}",
         f"{c.pace * 1e3:.2f}")
        for name, curves in drawn.items() for c in curves
    ]  # fmt: skip
    curves = {name: [vars(curve) for curve in found] for name, found in drawn.items()}
    title = f"Sparser and dense rows, {passes} passes, {os.cpu_count()} cores"
    report("async_adam_density", title, HEADINGS, rows, claims(drawn), curves=curves)
    draw(drawn, RESULTS / "async_adam_density.png")


if __name__ == "__main__":
    app()
