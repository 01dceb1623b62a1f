"""Iteration time where computation uses no core, as on the paper's GPUs (Table 2 of the paper).

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
    evidence={"Table 2": "Faster than dense SGD; beside accelerators, faster than SLGS"},
)


@command(BENCH, "--nodes 8 --full", full="20 rounds.", steps="Of each method in each round.")
def app(
    full: bool = False, nodes: int = 4, rate: str = "250mbit", steps: int = 4, rounds: int = 5
) -> Result:
    """Time dense SGD, SLGS and LAGS where computation uses no core."""
    rows, claims, measured = [], [], {}
    for model, (s1, s2, bound) in PAPER.items():
        rounds = 20 if full else rounds
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
