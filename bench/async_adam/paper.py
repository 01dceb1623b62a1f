"""Figures 1 to 5 of Asynchronous Adam: sparse logistic regression.

Every method is tuned on the paper's grid. The paper's figures have no numbers in the text, so its
statements are compared.
"""

import os
from typing import Annotated

import typer
from rich.progress import track

from bench.async_adam.curves import Curve, draw, record, timed, tuned
from bench.async_adam.sparse_problem import Method, adam, baseline, generate
from bench.harness import files
from bench.harness.bench import Bench
from bench.harness.claim import Claim
from bench.harness.console import console
from bench.harness.report import report

GRID = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0)  # section 4.2
THREAD_GRID = (0.01, 0.03, 0.05, 0.075, 0.1, 0.3, 0.5, 0.75, 1.0)  # section 4.3.2
SMALL, LARGE = 0.001, 0.1
THREADS = (1, 2, 4, 8)
FIGURES = {
    "1": "figure 1, each tuned",
    "2": "figure 2, one step size",
    "3": "figure 3, small step",
    "4": "figure 4, best step",
    "5": "figure 5, large step",
}
HEADINGS = ("figure", "method", "step size", "loss at the end", "test error", "ms a pass")
BENCH = Bench(
    name="async_adam/paper",
    claim="Shared, private and serial Adam (Fig. 1 to 5)",
    minutes=4,
    full_minutes=18,
)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
Drawn = dict[str, list[Curve]]


def figures(passes: int) -> Drawn:
    """All curves by figure."""
    problem = generate()
    methods: list[Method] = [adam(), adam("shared", 2), adam("private", 2)]
    methods += [baseline(svrg=False), baseline(svrg=True)]
    crowds = [adam(threads=count) for count in THREADS]
    work = track(range(len(methods) + len(crowds)), "tuning", console=console)
    best = [
        tuned(method, problem, passes, GRID if k < len(methods) else THREAD_GRID)
        for k, method in zip(work, methods + crowds, strict=True)
    ]
    first, fourth = best[: len(methods)], best[len(methods) :]
    one_step = [record(method(problem, first[0].alpha), problem, passes) for method in methods[:3]]
    small, large = (
        [record(crowd(problem, alpha), problem, passes) for crowd in crowds]
        for alpha in (SMALL, LARGE)
    )
    return {
        "1": timed(first, methods, problem),
        "2": timed(one_step, methods[:3], problem),
        **{
            name: timed(curves, crowds, problem)
            for name, curves in (("3", small), ("4", fourth), ("5", large))
        },
    }


def times(curves: list[Curve]) -> list[float]:
    """Seconds of each to the loss that all reach."""
    common = max(min(curve.loss) for curve in curves)
    return [curve.seconds_to(common) for curve in curves]


def listed(values: list[float], form: str) -> str:
    return ", ".join(format(value, form) for value in values)


def claims(drawn: Drawn) -> list[Claim]:
    serial, shared, private, *_ = drawn["1"]
    early = (serial.loss[0] + serial.loss[-1]) / 2
    start = [1e3 * curve.seconds_to(early) for curve in (serial, shared, private)]
    ends = [curve.loss[-1] for curve in (serial, shared, private)]
    same = [curve.loss[-1] for curve in drawn["2"]]
    whole = [1e3 * seconds for seconds in times(drawn["1"][:3])]
    gain = {n: [times(drawn[n])[0] / t for t in times(drawn[n])] for n in ("3", "4")}
    large = [curve.loss[-1] for curve in drawn["5"]]
    return [
        Claim("1: at first Shared and Private fall faster than serial, Shared first",
              "serial last", listed(start, ".2f") + " ms", start[1] <= start[2] < start[0]),
        Claim("1: to the end they are not much faster than serial", "no significant gain",
              listed(whole, ".1f") + " ms", min(whole[1:]) > whole[0] / 1.2),
        Claim("1: both end above serial", "larger noise ball", listed(ends, ".4f"),
              min(ends[1:]) > ends[0]),
        Claim("2: by passes both are worse than serial", "worse", listed(same, ".4f"),
              min(same[1:]) > same[0]),
        Claim("3: small step, time gains with threads (1, 2, 4, 8)", "nearly linear",
              listed(gain["3"], ".2f") + " x", gain["3"][1] > 1.5),
        Claim("4: best step, 2 threads beat 1", "faster", f"{gain['4'][1]:.2f} x",
              gain["4"][1] > 1.0),
        Claim("4: more than 2 do not beat 2", "slower", listed(gain["4"][2:], ".2f") + " x",
              max(gain["4"][2:]) <= gain["4"][1]),
        Claim("5: large step, more threads end higher (1, 2, 4, 8)", "worse",
              listed(large, ".3f"), min(large[1:]) > large[0]),
    ]  # fmt: skip


@app.command(epilog=BENCH.examples("--full"))
def main(
    full: Annotated[bool, typer.Option("--full", help="Five times the passes.")] = False,
) -> None:
    """Tune every method on the paper's grid and draw figures 1 to 5."""
    drawn = figures(100 if full else 20)
    rows = [
        (FIGURES[name], c.label, f"{c.alpha:g}", f"{c.loss[-1]:.4f}", f"{c.error[-1]:.4f}",
         f"{c.pace * 1e3:.2f}")
        for name, curves in drawn.items() for c in curves
    ]  # fmt: skip
    title = f"Renda, figures 1 to 5; more threads than {os.cpu_count()} share the cores"
    report(BENCH, title, HEADINGS, rows, claims(drawn), picture=drawn_as_json(drawn))
    draw(
        {FIGURES[n]: c for n, c in drawn.items()}, files.result(BENCH.name, ".png"), [FIGURES["2"]]
    )


def drawn_as_json(drawn: Drawn) -> dict[str, list[dict[str, object]]]:
    return {name: [vars(curve) for curve in curves] for name, curves in drawn.items()}


if __name__ == "__main__":
    app()
