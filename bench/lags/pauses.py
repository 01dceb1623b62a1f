"""Beside accelerators, where computing uses no core, LAGS is faster than SLGS.

Layers have the sizes of the paper's models, divided by 16, and pause instead of computing. Pauses
are such that eq. 19 allows about what it allows in the paper. One process per node.
"""

from functools import partial

from bench.harness import GOAL, Bench, Result, command
from bench.harness.attached import ALONE
from bench.harness.training import Training, times
from bench.lags.networks import task
from bench.lags.ways import PAPER, attach, judged, most

DENSITY = 0.05
METHODS = (
    "ddp", f"slgs(density={DENSITY})", f"lags(density={DENSITY})", "lags(density='adaptive')", ALONE
)  # fmt: skip
HEADINGS = (
    "model", "dense", "SLGS", "LAGS", "adaptive", "alone", "S1 (paper)", "S2 (paper)",
    "S2, adaptive", "S_max (paper)",
)  # fmt: skip
BENCH = Bench(name="lags/pauses", minutes=3, full_minutes=10, evidence="Table 2")


@command(BENCH, "--nodes 8 --full", full={"rounds": 20}, steps="Of each method in each round.")
def app(nodes: int = 4, rate: str = "250mbit", steps: int = 4, rounds: int = 5) -> Result:
    rows, claims, measured = [], [], {}
    for model, (s1, s2, bound) in PAPER.items():
        turns = Training(partial(task, model), METHODS, steps, rounds, attach=attach)
        found = measured[model] = times(turns, nodes, rate)
        dense, slgs, lags, adaptive, alone = found.values()
        rows.append((
            model, *(f"{each.step:.3f} s" for each in found.values()),
            f"{dense.over(lags):.2f} ({s1})", f"{slgs.over(lags):.2f} ({s2})",
            f"{slgs.over(adaptive):.2f}", f"{most(alone, slgs):.2f} ({bound})",
        ))  # fmt: skip
        claims += [  # the gain over dense SGD at the paper's densities is in lags/models
            judged(f"{model}: LAGS is faster than SLGS", s2, lags, slgs, "Table 2"),
            judged(f"{model}: LAGS is faster than dense SGD", s1, lags, dense, GOAL),
        ]
    title = f"{nodes} nodes, {rate}, density {DENSITY}"
    return Result(title, HEADINGS, rows, claims, measured)
