"""Time and accuracy of SGP as nodes are added (Table 1, Figure 1 of the paper).

All-reduce, D-PSGD and SGP, the latter two with one peer. The number of samples is the same for
all world sizes, so that more workers take fewer steps.
"""

from dataclasses import replace
from typing import Annotated

import typer

import offbeat
from bench.harness.bench import Bench
from bench.harness.claim import Claim
from bench.harness.console import console
from bench.harness.report import report
from bench.sgp.task import Case, in_threads
from bench.sgp.timing import RATE, in_lab

METHODS = {"AR-SGD": offbeat.ddp(), "D-PSGD": offbeat.d_psgd("bipartite"), "SGP": offbeat.sgp()}
PAPER = {  # accuracy in %, hours
    4: {"AR-SGD": (76.2, 22.0), "D-PSGD": (76.4, 19.7), "SGP": (76.3, 11.8)},
    8: {"AR-SGD": (76.4, 14.0), "D-PSGD": (76.1, 9.7), "SGP": (76.4, 5.9)},
    16: {"AR-SGD": (76.3, 8.5), "D-PSGD": (75.9, 5.0), "SGP": (75.9, 3.2)},
}
STEPS = 10  # that are timed
HEADINGS = ("workers", "method", "paper", "ours", "paper, x AR", "ours, x AR", "a step")
BENCH = Bench(
    name="sgp/scaling",
    claim="SGP is faster at every size (Table 1, Fig. 1)",
    minutes=6,
    full_minutes=18,
    evidence={
        "Table 1, Fig. 1": "Faster than all-reduce and D-PSGD; less accurate with many nodes"
    },
)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def measure(world: int, samples: int, seeds: int) -> dict[str, dict[str, object]]:
    """Accuracy over seeds, seconds per step, and the losses of the first seed."""
    methods = METHODS | {"compute only": offbeat.alone()}
    timed = [Case(name, method, world, 16 * world * STEPS) for name, method in methods.items()]
    seconds = {c.name: o.seconds for c, o in zip(timed, in_lab(timed), strict=True)}
    found: dict[str, dict[str, object]] = {"compute only": {"seconds": seconds["compute only"]}}
    for name, method in METHODS.items():
        case = Case(name, method, world, samples)
        outcomes = [in_threads(replace(case, seed=seed)) for seed in range(seeds)]
        found[name] = {
            "seconds": seconds[name],
            "hours": seconds[name] * case.steps / 3600,
            "heldout": [outcome.heldout for outcome in outcomes],
            "accuracy": 100 * sum(outcome.heldout for outcome in outcomes) / seeds,
            "losses": outcomes[0].losses,
        }
    return found


def rows(found: dict[int, dict[str, dict]]) -> list[tuple[str, ...]]:
    lines = []
    for world, methods in found.items():
        for name in METHODS:
            ours, (accuracy, hours) = methods[name], PAPER[world][name]
            faster = PAPER[world]["AR-SGD"][1] / hours, methods["AR-SGD"]["hours"] / ours["hours"]
            times = [f"{factor:.2f}" for factor in faster]
            step = f"{ours['seconds'] * 1e3:.0f} ms"
            lines.append(
                (f"{world}", name, f"{accuracy}%", f"{ours['accuracy']:.1f}%", *times, step)
            )
        floor = f"{methods['compute only']['seconds'] * 1e3:.0f} ms"
        lines.append((f"{world}", "compute only", "", "", "", "", floor))
    return lines


def claims(found: dict[int, dict[str, dict]]) -> list[Claim]:
    few, many = min(found), max(found)

    def ours(world: int, name: str, what: str) -> float:
        return float(found[world][name][what])

    to_ar = [ours(w, "AR-SGD", "hours") / ours(w, "SGP", "hours") for w in found]
    to_pairs = [ours(w, "D-PSGD", "hours") / ours(w, "SGP", "hours") for w in found]
    gap = {n: ours(many, "AR-SGD", "accuracy") - ours(many, n, "accuracy") for n in METHODS}
    near = max(abs(ours(few, n, "accuracy") - ours(few, "AR-SGD", "accuracy")) for n in METHODS)
    growth = {n: ours(many, n, "seconds") / ours(few, n, "seconds") for n in METHODS}
    grown = ", ".join(f"{name} {factor:.2f}" for name, factor in growth.items())
    return [
        Claim("SGP is faster than all-reduce at every size", "1.9 - 2.7 x", spread(to_ar),
              min(to_ar) > 1.0),
        Claim("SGP is faster than D-PSGD", "1.6 - 1.7 x", spread(to_pairs), min(to_pairs) > 1.05),
        Claim(f"a step of SGP grows less than one of AR, {few} to {many} nodes",
              "AR 1.55, D-PSGD 1.02, SGP 1.08", grown, growth["SGP"] < growth["AR-SGD"]),
        Claim(f"at {few} nodes all are about as accurate", "within 0.2 %", f"within {near:.1f} %",
              near < 1.0),
        Claim(f"at {many} nodes gossip is less accurate", "0.4 % less",
              f"D-PSGD {gap['D-PSGD']:.1f} %, SGP {gap['SGP']:.1f} % less", gap["SGP"] > 0.2),
    ]  # fmt: skip


def without_losses(found: dict[int, dict[str, dict]]) -> dict[int, dict[str, dict]]:
    return {
        world: {n: {k: v for k, v in m.items() if k != "losses"} for n, m in methods.items()}
        for world, methods in found.items()
    }


def spread(values: list[float]) -> str:
    return f"{min(values):.2f} - {max(values):.2f} x"


@app.command(epilog=BENCH.examples("--full"))
def main(
    full: Annotated[bool, typer.Option("--full", help="Three seeds instead of one.")] = False,
    worlds: Annotated[str, typer.Option(help="Numbers of workers: 4, 8, 16.")] = "4,8,16",
    samples: Annotated[int, typer.Option(help="Images seen by all workers together.")] = 20_000,
) -> None:
    """Compare all-reduce, D-PSGD and SGP with 4, 8 and 16 workers."""
    console.print(f"time: one process per emulated node, {RATE}; accuracy: virtual workers")
    found = {int(w): measure(int(w), samples, 3 if full else 1) for w in worlds.split(",")}
    title = f"Table 1: accuracy, and how much faster than all-reduce ({RATE})"
    report(
        BENCH,
        title,
        HEADINGS,
        rows(found),
        claims(found),
        measured=without_losses(found),
        raw=found,
    )


if __name__ == "__main__":
    app()
