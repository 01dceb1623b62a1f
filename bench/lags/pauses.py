"""Iteration time where computation uses no core, as on the paper's GPUs (Table 2 of the paper).

Layers have the sizes of the paper's models, divided by 16, and pause instead of computing. Pauses
are such that eq. 19 allows about what it allows in the paper. One process per node.
"""

from functools import partial

from bench.harness import GOAL, Bench, Claim, Effect, Result, command
from bench.harness.attached import ALONE
from bench.harness.training import Found, Training, times
from bench.lags.networks import task
from bench.lags.ways import attach, most

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
    evidence={"Table 2": "Faster than dense SGD; beside accelerators, faster than SLGS"},
)


def row(model: str, found: Found) -> tuple[str, ...]:
    """Seconds a step, and the speed-ups beside the paper's."""
    s1, s2, bound = PAPER[model]
    return (
        model,
        *(f"{found[method].step:.3f} s" for method in METHODS),
        f"{found['ddp'].over(found[LAGS]):.2f} ({s1})",
        f"{found[SLGS].over(found[LAGS]):.2f} ({s2})",
        f"{found[SLGS].over(found[ADAPTIVE]):.2f}",
        f"{most(found[ALONE], found[SLGS]):.2f} ({bound})",
    )


def claims(model: str, found: Found) -> list[Claim]:
    """The gain over SLGS; that over dense SGD at the paper's densities is in ``lags/models``."""
    s1, s2, _ = PAPER[model]
    return [
        Claim.effect(f"{model}: LAGS is faster than SLGS", Effect(s2, "x"),
                     Effect(found[SLGS].over(found[LAGS]), "x"), "Table 2"),
        Claim.effect(f"{model}: LAGS is faster than dense SGD", Effect(s1, "x"),
                     Effect(found["ddp"].over(found[LAGS]), "x"), GOAL),
    ]  # fmt: skip


@command(BENCH, "--nodes 8 --full", full="20 rounds.", steps="Of each method in each round.")
def app(
    full: bool = False, nodes: int = 4, rate: str = "250mbit", steps: int = 4, rounds: int = 5
) -> Result:
    """Time dense SGD, SLGS and LAGS where computation uses no core."""
    found = {}
    for model in PAPER:
        turns = Training(
            partial(task, model), METHODS, steps, 20 if full else rounds, attach=attach
        )
        found[model] = times(turns, nodes, rate)
    return Result(
        f"{nodes} nodes, {rate}, density {DENSITY}",
        HEADINGS,
        [row(*each) for each in found.items()],
        [claim for each in found.items() for claim in claims(*each)],
        measured=found,
    )
