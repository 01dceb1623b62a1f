"""Iteration time of three kinds of models, and the bound of eq. 19 (Table 2 of the LAGS paper).

A ResNet, a net of Inception modules and a language model of two LSTM layers, one process per
node. Overlap gains little where the cores compute: ``lags/pauses`` is beside accelerators.
"""

from functools import partial

from bench.harness import GOAL, Bench, Claim, Effect, Result, command
from bench.harness.attached import ALONE
from bench.harness.training import Training, times
from bench.lags.networks import task
from bench.lags.ways import attach, most

# The paper's model and density, and S1, S2 and S_max as printed.
PAPER = {
    "resnet": ("ResNet-50", "0.001", (2.86, 1.31, 1.52)),
    "inception": ("Inception-v4", "0.001", (3.08, 1.28, 1.29)),
    "lstm": ("LSTM-PTB", "0.004", (8.52, 1.11, 1.28)),
}
BENCH = Bench(
    name="lags/models",
    claim="LAGS is faster on three models (Table 2)",
    minutes=2,
    full_minutes=7,
    evidence={"Table 2": "Faster than dense SGD; beside accelerators, faster than SLGS"},
)


@command(BENCH, "--nodes 8 --full", full="20 rounds.", steps="Of each method in each round.")
def app(
    full: bool = False, nodes: int = 4, rate: str = "250mbit", steps: int = 3, rounds: int = 5
) -> Result:
    """Time three kinds of models under dense SGD, SLGS and LAGS."""
    rows, judged, measured = [], [], {}
    for model, (name, density, paper) in PAPER.items():
        methods = ("ddp", f"slgs(density={density})", f"lags(density={density})", ALONE)
        turns = Training(
            partial(task, model), methods, steps, 20 if full else rounds, attach=attach
        )
        measured[model] = times(turns, nodes, rate)
        dense, slgs, lags, alone = measured[model].values()
        ours = dense.over(lags), slgs.over(lags), most(alone, slgs)
        beside = (f"{o:.2f} ({p})" for o, p in zip(ours, paper, strict=True))
        rows.append((model, *(f"{each.step:.3f} s" for each in measured[model].values()), *beside))
        s1, s2 = ((Effect(p, "x"), Effect(o, "x")) for p, o in zip(paper[:2], ours, strict=False))
        judged += [
            Claim.effect(f"{name}: LAGS is faster than dense SGD", *s1, "Table 2"),
            Claim.effect(f"{name}: LAGS is faster than SLGS on busy cores", *s2, GOAL),
        ]
    headings = (
        "model", "dense", "SLGS", "LAGS", "alone", "S1 (paper)", "S2 (paper)", "S_max (paper)",
    )  # fmt: skip
    return Result(f"{nodes} nodes, {rate}", headings, rows, judged, measured)
