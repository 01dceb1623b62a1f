"""Accuracy and time of SGP by graph and schedule (Table 3 of the paper).

One peer, two peers, and hybrids whose first third is an all-reduce or has two peers. Accuracy is
that of virtual workers on MNIST-1D; the time of a hybrid is computed from those of its phases.

Time is measured twice: on slow links alone, and on faster ones between workers that compute
unevenly, for times with an exponential distribution, the usual model of stragglers.
"""

from collections.abc import Sequence
from typing import Any

import offbeat
from bench.harness import Bench, Claim, Effect, Result, command
from bench.harness.case import Pause
from bench.harness.rows import in_rows, signals_case
from bench.harness.seeds import Runs, over_seeds
from bench.sgp.task import LINK, Times, times
from offbeat import Complete, Exponential, Phases

UNEVEN_NODES, UNEVEN_LINK = 16, "250mbit"
UNEVEN = Pause(0.1, uneven=True)  # the model takes 0.014 s
PAPER = {  # accuracy in %, hours
    16: {"AR-SGD": (76.3, 8.5), "2P-SGP": (76.2, 5.1), "1P-SGP": (75.9, 3.2),
         "AR/1P-SGP": (76.2, 4.8), "2P/1P-SGP": (76.0, 3.5)},
    32: {"AR-SGD": (76.2, 5.2), "2P-SGP": (75.7, 2.5), "1P-SGP": (75.0, 1.7),
         "AR/1P-SGP": (75.4, 2.8), "2P/1P-SGP": (75.1, 1.8)},
}  # fmt: skip
PURE = {"AR-SGD": offbeat.ddp(), "2P-SGP": offbeat.sgp(peers=2), "1P-SGP": offbeat.sgp()}
EARLY = {"AR/1P-SGP": ("AR-SGD", Complete()), "2P/1P-SGP": ("2P-SGP", Exponential(2))}
HEADINGS = ("workers", "method", "paper", "ours", "paper, x AR", "ours, x AR", "uneven, x AR")
BENCH = Bench(
    name="sgp/graphs",
    claim="More peers are more accurate (Table 3)",
    minutes=10,
    full_minutes=16,
    evidence={"Table 3": "More peers, at least early, are slower and more accurate"},
)


def method(name: str, steps: int) -> offbeat.Algorithm:
    """Hybrids change their graph after a third of the steps."""
    if name in PURE:
        return PURE[name]
    return offbeat.sgp(Phases(((steps // 3, EARLY[name][1]), (None, Exponential()))))


def accuracy(name: str, world: int, seeds: int) -> Runs:
    steps = signals_case(name, PURE["AR-SGD"], world).steps
    return over_seeds(in_rows, signals_case(name, method(name, steps), world), seeds)


def with_hybrids(seconds: Times) -> Times:
    """A third of a hybrid's steps takes as long as in its first phase, the others as in 1P-SGP."""
    hybrids = {
        name: seconds[early] / 3 + seconds["1P-SGP"] * 2 / 3 for name, (early, _) in EARLY.items()
    }
    return seconds | hybrids


def faster(runs: Sequence[Times], name: str) -> Effect:
    """How much faster than an all-reduce."""
    return Effect.between([t["AR-SGD"] for t in runs], [t[name] for t in runs], "x")


def more_accurate(world: int, found: dict[str, Runs], name: str) -> Claim:
    paper = Effect(PAPER[world][name][0] - PAPER[world]["1P-SGP"][0])
    text = f"{world} workers: {name} is more accurate than 1P-SGP"
    return Claim.effect(text, paper, found[name].over(found["1P-SGP"]))


def faster_if_uneven(runs: Sequence[Times], name: str) -> Claim:
    paper = Effect(PAPER[16]["AR-SGD"][1] / PAPER[16][name][1], "x")
    text = f"{name} is faster than AR-SGD between workers that compute unevenly"
    return Claim.effect(text, paper, faster(runs, name))


@command(BENCH, "--full", full="Twice the seeds.", nodes="With slow links.", runs="That are timed.")
def app(full: bool = False, seeds: int = 15, nodes: int = 8, runs: int = 5) -> Result:
    """Compare one peer, two peers and hybrids with 16 and with 32 workers."""
    even = [*map(with_hybrids, times(PURE, nodes, 20, runs=runs))]
    spread = times(PURE, UNEVEN_NODES, 40, UNEVEN, UNEVEN_LINK, runs)
    uneven = [*map(with_hybrids, spread)]
    rows: list[tuple[str, ...]] = []
    judged: list[Claim] = []
    measured: dict[Any, Any] = {"seconds": even, "uneven": uneven}
    for world, paper in PAPER.items():
        found = {name: accuracy(name, world, seeds * (1 + full)) for name in paper}
        measured[world] = found
        judged += [more_accurate(world, found, name) for name in paper if name != "1P-SGP"]
        for name, (percent, hours) in paper.items():
            factors = [paper["AR-SGD"][1] / hours, *(faster(t, name).size for t in (even, uneven))]
            cells = [f"{factor:.2f}" for factor in factors]
            rows.append((f"{world}", name, f"{percent}%", str(found[name]), *cells))
    judged += [faster_if_uneven(uneven, name) for name in ("1P-SGP", "2P-SGP")]
    title = f"Table 3: accuracy, and how much faster than all-reduce ({LINK})"
    return Result(title, HEADINGS, rows, judged, measured=measured)
