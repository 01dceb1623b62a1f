"""Iteration time where computation uses no core, as on the paper's GPUs (Table 2 of the paper).

Layers have the sizes of the paper's models, divided by 16, and pause instead of computing. Pauses
are such that eq. 19 allows about what it allows in the paper. One process per node.
"""

from typing import Annotated

import typer

from bench.harness.bench import Bench
from bench.harness.claim import GOAL, Claim
from bench.harness.effect import Effect
from bench.harness.report import report
from bench.lags.turns import ALONE, Times, in_lab, most

# S1, S2 and S_max as printed.
PAPER = {
    "ResNet-50": (2.86, 1.31, 1.52),
    "Inception-v4": (3.08, 1.28, 1.29),
    "LSTM-PTB": (8.52, 1.11, 1.28),
}
DENSITY = 0.05
SLGS, LAGS = f"slgs(density={DENSITY})", f"lags(density={DENSITY})"
ADAPTIVE = "lags(density='adaptive')"
METHODS = ("ddp", SLGS, LAGS, ADAPTIVE, ALONE)
HEADINGS = (
    "model", "dense", "SLGS", "LAGS", "adaptive", "alone", "S1 (paper)", "S2 (paper)",
    "S2, adaptive", "S_max (paper)",
)  # fmt: skip
BENCH = Bench(
    name="lags/pauses",
    claim="LAGS is faster beside accelerators (Table 2)",
    minutes=3,
    full_minutes=10,
    evidence={"Table 2": "Faster than dense SGD and than sparsifying all layers at once"},
)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def row(model: str, found: dict[str, Times]) -> tuple[str, ...]:
    """Seconds a step, and the speed-ups beside the paper's."""
    ours = found["ddp"].over(found[LAGS]), found[SLGS].over(found[LAGS])
    s1, s2, bound = PAPER[model]
    return (
        model,
        *(f"{found[method].step:.3f} s" for method in METHODS),
        f"{ours[0]:.2f} ({s1})",
        f"{ours[1]:.2f} ({s2})",
        f"{found[SLGS].over(found[ADAPTIVE]):.2f}",
        f"{most(found[ALONE], found[SLGS]):.2f} ({bound})",
    )


def claims(model: str, found: dict[str, Times]) -> list[Claim]:
    """The gain over SLGS; that over dense SGD at the paper's densities is in ``lags/models``."""
    dense, slgs = found["ddp"].over(found[LAGS]), found[SLGS].over(found[LAGS])
    s1, s2, _ = PAPER[model]
    return [
        Claim.effect(f"{model}: LAGS is faster than SLGS", Effect(s2, "x"), Effect(slgs, "x"),
                     "Table 2"),
        Claim.effect(f"{model}: LAGS is faster than dense SGD", Effect(s1, "x"),
                     Effect(dense, "x"), GOAL),
    ]  # fmt: skip


@app.command(epilog=BENCH.examples("--nodes 8 --full"))
def main(
    full: Annotated[bool, typer.Option("--full", help="20 rounds.")] = False,
    nodes: Annotated[int, typer.Option(help="Emulated nodes.")] = 4,
    rate: Annotated[str, typer.Option(help="Of every node's link.")] = "250mbit",
    steps: Annotated[int, typer.Option(help="Steps of each method in each round.")] = 4,
    rounds: Annotated[int, typer.Option(help="Rounds of turns.")] = 5,
) -> None:
    """Time dense SGD, SLGS and LAGS where computation uses no core."""
    times = in_lab(nodes, rate, [*PAPER], METHODS, steps, 20 if full else rounds)
    lines = [row(model, found) for model, found in times.items()]
    judged = [claim for model, found in times.items() for claim in claims(model, found)]
    title = f"{nodes} nodes, {rate}, density {DENSITY}"
    report(BENCH, title, HEADINGS, lines, judged, measured=times)


if __name__ == "__main__":
    app()
