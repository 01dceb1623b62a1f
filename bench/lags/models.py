"""Faster than dense SGD; beside accelerators, faster than SLGS.

A ResNet, a net of Inception modules and a language model of two LSTM layers, one process per
node. Overlap gains little where the cores compute: ``lags/pauses`` is beside accelerators.
"""

from functools import partial

from bench.harness import GOAL, Bench, Result, command
from bench.harness.attached import ALONE
from bench.harness.training import Training, times
from bench.lags.networks import task
from bench.lags.ways import PAPER, attach, judged, most

MODELS = {  # the paper's, and its density
    "resnet": ("ResNet-50", "0.001"),
    "inception": ("Inception-v4", "0.001"),
    "lstm": ("LSTM-PTB", "0.004"),
}
HEADINGS = ("model", "dense", "SLGS", "LAGS", "alone", "S1 (paper)", "S2 (paper)", "S_max (paper)")
BENCH = Bench(name="lags/models", minutes=2, full_minutes=7, evidence="Table 2")


@command(BENCH, "--nodes 8 --full", full={"rounds": 20}, steps="Of each method in each round.")
def app(nodes: int = 4, rate: str = "250mbit", steps: int = 3, rounds: int = 5) -> Result:
    rows, claims, measured = [], [], {}
    for model, (name, density) in MODELS.items():
        methods = ("ddp", f"slgs(density={density})", f"lags(density={density})", ALONE)
        turns = Training(partial(task, model), methods, steps, rounds, attach=attach)
        found = measured[model] = times(turns, nodes, rate)
        dense, slgs, lags, alone = found.values()
        s1, s2, bound = PAPER[name]
        rows.append((
            model, *(f"{each.step:.3f} s" for each in found.values()),
            f"{dense.over(lags):.2f} ({s1})", f"{slgs.over(lags):.2f} ({s2})",
            f"{most(alone, slgs):.2f} ({bound})",
        ))  # fmt: skip
        claims += [
            judged(f"{name}: LAGS is faster than dense SGD", s1, lags, dense, "Table 2"),
            judged(f"{name}: LAGS is faster than SLGS on busy cores", s2, lags, slgs, GOAL),
        ]
    return Result(f"{nodes} nodes, {rate}", HEADINGS, rows, claims, measured)
