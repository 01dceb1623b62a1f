"""Iteration time of three kinds of models, and the bound of eq. 19 (Table 2 of the LAGS paper).

A ResNet, a net of Inception modules and a language model of two LSTM layers, one process per
node.
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
    "resnet": ("ResNet-50", (2.86, 1.31, 1.52)),
    "inception": ("Inception-v4", (3.08, 1.28, 1.29)),
    "lstm": ("LSTM-PTB", (8.52, 1.11, 1.28)),
}
BENCH = Bench(
    name="lags/models",
    claim="LAGS is faster on three models (Table 2)",
    minutes=2,
    full_minutes=7,
    evidence={"Table 2": "Faster than dense SGD and than sparsifying all layers at once"},
)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def speedups(found: dict[str, Times], sparse: str) -> tuple[float, float, float]:
    """S1 = dense / LAGS, S2 = SLGS / LAGS, and S_max of what communication adds to SLGS."""
    dense, slgs, lags = (found[name] for name in ("ddp", *both(sparse)))
    return dense.over(lags), slgs.over(lags), most(found[ALONE], slgs)


def both(density: str) -> tuple[str, str]:
    return f"slgs(density={density})", f"lags(density={density})"


@app.command(epilog=BENCH.examples("--nodes 8 --full"))
def main(
    full: Annotated[bool, typer.Option("--full", help="20 rounds.")] = False,
    nodes: Annotated[int, typer.Option(help="Emulated nodes.")] = 4,
    rate: Annotated[str, typer.Option(help="Of every node's link.")] = "250mbit",
    steps: Annotated[int, typer.Option(help="Steps of each method in each round.")] = 3,
    rounds: Annotated[int, typer.Option(help="Rounds of turns.")] = 5,
) -> None:
    """Time three kinds of models under dense SGD, SLGS and LAGS."""
    rounds = 20 if full else rounds
    lines, judged, times = [], [], {}
    for model, (name, paper) in PAPER.items():
        sparse = "0.004" if model == "lstm" else "0.001"  # the paper's ratios: 250 and 1000
        methods = ("ddp", *both(sparse), ALONE)
        found = in_lab(nodes, rate, [model], methods, steps, rounds)[model]
        ours = speedups(found, sparse)
        steps_of = [f"{found[method].step:.3f} s" for method in methods]
        lines.append(
            (model, *steps_of, *(f"{o:.2f} ({p})" for o, p in zip(ours, paper, strict=True)))
        )
        judged += [
            Claim.effect(f"{name}: LAGS is faster than dense SGD", Effect(paper[0], "x"),
                         Effect(ours[0], "x"), "Table 2"),
            # Overlap gains little where the cores compute: lags/pauses is beside accelerators.
            Claim.effect(f"{name}: LAGS is faster than SLGS on busy cores", Effect(paper[1], "x"),
                         Effect(ours[1], "x"), GOAL),
        ]  # fmt: skip
        times[model] = found
    headings = (
        "model",
        "dense",
        "SLGS",
        "LAGS",
        "alone",
        "S1 (paper)",
        "S2 (paper)",
        "S_max (paper)",
    )
    report(BENCH, f"{nodes} nodes, {rate}", headings, lines, judged, measured=times)


if __name__ == "__main__":
    app()
